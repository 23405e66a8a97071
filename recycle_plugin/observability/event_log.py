"""The event log of a run folder: one JSON object a line, read as a whole or in outline, also while it grows."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recycle_plugin.observability.event_fields import check
from recycle_plugin.observability.outline import Entry, may_be_left_out, outline

EVENTS = "events.jsonl"


class EventLog:
    """The event log of a run folder, read further as it grows.

    If it is not read as a ``whole``, a long run has most of its steps left out (observability/outline.py): medians are
    then those of the other steps. Both ways take time linear in the log; the outline of 200,000 steps takes 0.5 s, the
    whole 5 s.
    """

    def __init__(self, folder: Path, whole: bool = True) -> None:
        self._folder, self._whole = folder, whole
        self._bytes = self._lines = 0  # read so far
        self._events: list[dict] = []  # of the last job, or of the whole log if none has started
        self._start: dict | None = None

    def events(self) -> tuple[dict, ...]:
        """Return the events so far of the last job started in the folder. Raises ValueError, in one line that names
        the log, if there is none or a needed event lacks a field.
        """
        path = self._folder / EVENTS
        if not path.is_file():
            missing = "has no events.jsonl" if self._folder.is_dir() else "is no folder"
            raise ValueError(
                f"{self._folder} {missing}: name a run folder (recycle.run_dir; by default one under runs/)"
            )
        new = self._read(path)
        starts = [place for place, event in enumerate(self._events) if event["event"] == "start"]
        if not starts:
            raise ValueError(f"{path} has no job: its start event is missing")
        if self._events[starts[-1]] is not self._start:
            self._start = self._events[starts[-1]]
            first = starts[-1]
            while first and self._events[first - 1]["event"] == "worker":  # workers report before the start
                first -= 1
            new = self._events = self._events[first:]
        try:
            check(new, self._start)
        except ValueError as wrong:
            raise ValueError(f"{path}: {wrong}") from None
        return tuple(self._events)

    def _read(self, path: Path) -> list[dict]:
        """Return the events since the last call."""
        with path.open("rb") as file:
            file.seek(self._bytes)
            *lines, rest = file.read().split(b"\n")
            self._bytes = file.tell() - len(rest)
        known, first = len(self._events), self._lines + 1 - len(self._events)  # the line number of entry 0
        self._lines += len(lines)
        with _uncollected():
            entries: list[Entry] = [*self._events]
            for place, line in enumerate(lines, known):
                passed = not self._whole and may_be_left_out(line)
                entries.append(line if passed else _parsed(line, first + place, path))
            kept = range(len(entries)) if self._whole else outline(entries)
            old = [one for place in kept if place < known and isinstance(one := entries[place], dict)]
            new = [_event(entries[place], first + place, path) for place in kept if place >= known]
        self._events = old + new
        return new


def last_event(path: Path) -> dict:
    """Return the last whole event of a log, {} if there is none. Raises ValueError for a line that is no event."""
    text = path.read_bytes() if path.is_file() else b""
    text = text[: text.rfind(b"\n") + 1]
    return _parsed(text[text.rfind(b"\n", 0, -1) + 1 :], text.count(b"\n"), path) if text else {}


def read_events(path: Path) -> list[dict]:
    """Return the events of all whole lines of a log, if there is one. Raises ValueError for a line that is no event."""
    *lines, _ = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    with _uncollected():
        return [_parsed(line, number, path) for number, line in enumerate(lines, 1)]


def _event(entry: Entry, number: int, path: Path) -> dict:
    return _parsed(entry, number, path) if isinstance(entry, bytes) else entry


def _parsed(line: bytes, number: int, path: Path) -> dict:
    """Return the event of the line with this ``number``, from 1 on. Raises ValueError for other lines."""
    try:
        event = json.loads(line.decode())
        _ = event["event"], event["time"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path}, line {number} is no event: {line.decode(errors='replace')[:60].strip()}") from None
    return event


@contextmanager
def _uncollected() -> Iterator[None]:
    """A context without cyclic garbage collection: all that is read stays, and a collector that passes it again and
    again costs three times the reading.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
