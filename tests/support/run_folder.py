"""The hand-written run as a folder, other events in it, and a report as it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.lab.runs import RunOutcome
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.trace import TraceFile

LOG = Path(__file__).parents[1] / "demo" / "with_failure.jsonl"
WHY = "its process was killed by signal 9 (SIGKILL), says its supervisor"
VOID = {"meta", "img"}


def trace(folder: Path) -> None:
    files = {seat: TraceFile(folder / "trace", seat, print) for seat in {span.seat for span in spans()}}
    for span in spans():
        files[span.seat].ran(span)
    for file in files.values():
        file.close()


class Read(HTMLParser):
    """Checks that every element is closed in its order; ``texts`` by element, ``links``: whatever a browser would
    fetch.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.links: list[str] = []
        self.images: list[bytes] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes) -> None:
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes) -> None:
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag) -> None:
        assert tag == self.open.pop(), f"</{tag}> closes {self.open}"

    def handle_data(self, data) -> None:
        if data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())


def rewrite(folder: Path, change: Callable[[list[dict]], list[dict]]) -> RunHistory:
    path = folder / "events.jsonl"
    events = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return RunHistory.read(folder)


def two_at_once(events: list[dict]) -> list[dict]:
    lost = {"time": 102.815, "event": "lost", "text": "", "seat": "1.0", "rank": 1, "how": "silent", "seen_at": 102.81}
    place = next(number for number, event in enumerate(events) if event["event"] == "confirmed")
    return [*events[:place], lost, *events[place:]]


STEPS = 9
LOSSES = [5.0 - step / 10 for step in range(STEPS)]


def outcome(*killed: int, pids: Mapping[int, int] = {}, losses: Mapping[int, list[float]] = {}) -> RunOutcome:
    """The run of the hand-written events; ranks in ``killed`` have left no record."""
    events = tuple(map(json.loads, LOG.read_text().splitlines()))
    ranks = [rank for rank in range(4) if rank not in killed]
    return RunOutcome(
        events,
        0,
        {
            rank: {"rank": rank, "pid": pids.get(rank, 1000 + rank), "losses": losses.get(rank, LOSSES)}
            for rank in ranks
        },
    )


def spans() -> list[Span]:
    """Steps of 200 ms from 101.7 s on: on each stage F 20 ms, I 10 ms, W 5 ms, REDUCE 8 ms for who comes last, STEP 3
    ms.
    """
    made = []
    for step in range(1, STEPS + 1):
        for seat in (Seat(0, 0), Seat(1, 0), Seat(0, 1), Seat(1, 1)):
            if seat == Seat(0, 1) and step > 5:
                continue
            at = 101_550_000 + 200_000 * step + 1000 * seat.stage
            reduce = 8000 if seat.replica else 30_000
            for text, took in (
                (f"F{seat.replica}.0", 20_000),
                (f"I{seat.replica}.0", 10_000),
                (f"W{seat.replica}.0", 5000),
                ("REDUCE", reduce),
                ("STEP", 3000),
            ):
                made.append(Span(seat, Instruction.parse(f"{seat.stage}{text}@{step}"), at, at + took))
                at += took
    return made


FAULT_FREE, FAILED = outcome(), outcome(2)
CAME = {"event": "newcomer", "seat": "0.1", "rank": 2, "incarnation": 1, "step": 8}


def resume(time: float, committed: int, throughput: float) -> dict:
    return {"time": time, "event": "resume", "committed": committed, "throughput": throughput}
