"""The hand-written run as a folder, other events in it, and a report as it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.trace import TraceFile
from tests.demo.test_report import spans

LOG = Path(__file__).parents[1] / "demo" / "with_failure.jsonl"
WHY = "its process was killed by signal 9 (SIGKILL), says its supervisor"
VOID = {"meta", "img"}


def trace(folder: Path) -> None:
    files = {seat: TraceFile(folder / "trace", seat, print) for seat in {span.seat for span in spans()}}
    for span in spans():
        files[span.seat].add(span)
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
    """The run with other events."""
    path = folder / "events.jsonl"
    events = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return RunHistory.read(folder)


def two_at_once(events: list[dict]) -> list[dict]:
    """1.0 is lost with 0.1."""
    lost = {"time": 102.815, "event": "lost", "text": "", "seat": "1.0", "rank": 1, "how": "silent", "seen_at": 102.81}
    place = next(number for number, event in enumerate(events) if event["event"] == "confirmed")
    return [*events[:place], lost, *events[place:]]
