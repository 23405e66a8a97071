"""Long logs: ``recycle status`` and ``recycle top`` read an outline, from which they say what the whole log says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from recycle_plugin.commands.status import status
from recycle_plugin.observability.event_log import EventLog
from recycle_plugin.observability.outline import FIRST, MOST
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.seats import seat_states
from tests.support.run_folder import LOG, resume

BEGAN = 100.0
LOST = {"event": "lost", "seat": "0.1", "rank": 2, "how": "its connection broke"}


def steps(first: int, last: int, at: float, step_s: float, **more: object) -> Iterator[dict]:
    for number in range(first, last + 1):
        at += step_s
        yield {"time": at, "event": "loss", "text": "", "step": number, "loss": 5.0 - number / 1e6}
        yield {"time": at, "event": "committed", "text": "", "step": number, "workers": 4, **more}
        if number % 1000 == 0:
            yield {"time": at, "event": "checkpoint", "text": "", "step": number, "path": f"saved/{number}"}


def long_run(each: int) -> Iterator[dict]:
    """Steps of 1 s, steps of 2 s to which replica 0 adds nothing, and steps of 1 s after its return, ``each`` many."""
    yield from (one for one in map(json.loads, LOG.read_text().splitlines()) if one["event"] in ("worker", "start"))
    yield resume(BEGAN, 0, 1.0)
    yield from steps(1, each, BEGAN, 1.0)
    now = BEGAN + each
    yield {**LOST, "time": now + 0.5, "seen_at": now + 0.5}
    yield resume(now + 0.6, each, 0.5)
    yield from steps(each + 1, 2 * each, now, 2.0, contributed=[1], replicas=2)
    now += 2 * each
    yield {"time": now, "event": "rejoined", "seat": "0.1", "rank": 2, "step": 2 * each + 1}
    yield resume(now, 2 * each, 1.0)
    yield from steps(2 * each + 1, 3 * each, now, 1.0)


def write(folder: Path, events: Iterator[dict]) -> None:
    with (folder / "events.jsonl").open("a") as log:
        log.writelines(f"{json.dumps(event)}\n" for event in events)


def test_the_outline_of_a_log_says_what_the_whole_says(tmp_path):
    write(tmp_path, long_run(20_000))
    whole, outline = RunHistory.read(tmp_path), RunHistory.read(tmp_path, whole=False)
    assert len(whole.events) > 120_000 and len(outline.events) < MOST + FIRST + 200
    now = whole.events[-1]["time"] + 3.0
    told = status(whole, now)
    assert status(outline, now) == told and seat_states(outline, now) == seat_states(whole, now)
    assert told["ettr"] == pytest.approx(2.5 / 4, abs=1e-3) and told["step"] == 60_000


def test_as_a_log_grows_its_outline_does_not(tmp_path):
    events = [*long_run(20_000)]
    log = EventLog(tmp_path, whole=False)
    for first in range(0, len(events), 7777):
        write(tmp_path, iter(events[first : first + 7777]))
        found = RunHistory(log.events())
        assert len(found.events) < MOST + FIRST + 200
    now = events[-1]["time"]
    assert status(found, now) == status(RunHistory.read(tmp_path), now)


def test_a_damaged_line_among_those_left_out_is_named(tmp_path):
    write(tmp_path, long_run(10_000))
    path = tmp_path / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[10_000] = lines[10_000][:40] + "\n"
    path.write_text("".join(lines))
    for whole in (True, False):
        with pytest.raises(ValueError, match=r"line 10001 is no event"):
            RunHistory.read(tmp_path, whole)
