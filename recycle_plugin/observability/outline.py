"""The outline of an event log: what tells how a job is, without most of the steps of a long run.

A step has two lines in the log, and nearly all lines are of steps. The outline has all other events. Of the steps it
has the first ones of the last job, and those near its end and near each event that changes the job's pace or its
members. To parse and check a line costs ten times as much as to pass over it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

STEPS = ("committed", "loss")
TURNS = frozenset(
    ("start", "coordinator", "batch", "lost", "leaving", "left", "resume", "rejoined", "loaded", "finished", "end")
)
"""Kinds of events that steps are looked up beside."""
FIRST = 2000  # lines after the job's start: the usual step is taken from them (observability/training_time.py)
NEAR = 30  # least lines before and after a turn, and at the end: more than the 10 steps from which "now" is taken
MOST = 10_000  # lines in all, if there are few turns

_is_step = re.compile(rb'\{"time": [0-9.]+, "event": "(?:committed|loss)", [^\n]*\}').fullmatch

Entry = dict | bytes
"""An event, or the line of one that may be left out."""


def may_be_left_out(line: bytes) -> bool:
    """Return whether this is a whole line of a step; other lines have to be parsed in any case."""
    return _is_step(line) is not None


def outline(entries: Sequence[Entry]) -> list[int]:
    """Return the positions of the entries to keep, in their order. The cost is linear in the entries."""
    others = [place for place, one in enumerate(entries) if not isinstance(one, bytes) and one["event"] not in STEPS]
    turns = [(place, kind) for place in others if (kind := _kind(entries[place])) in TURNS]
    near = max(NEAR, MOST // (1 + len(turns)) // 2)
    began = max((place for place, kind in turns if kind == "start"), default=0)
    kept = {*others, *range(began, min(began + FIRST, len(entries)))}
    for turn in (*(place for place, _ in turns), len(entries)):
        kept.update(range(max(0, turn - near), min(turn + near, len(entries))))
    return sorted(kept)


def _kind(entry: Entry) -> str:
    return "" if isinstance(entry, bytes) else entry["event"]
