"""The words of heartbeats for what a worker is doing, which the failure detector and the wait graph read."""

from __future__ import annotations

from recycle_plugin.core.vocabulary.ids import Seat

COMPUTES, WAITS, ELSEWHERE = "computes", "waits", "is in"
LONGEST = 200  # characters of what a worker is at: a group of a thousand has a long name


def awaited(datum: object, source: Seat) -> str:
    """The name of a wait for ``datum`` from the worker at ``source``, by which the wait graph knows whom it waits
    for.
    """
    return f"{datum} from seat {source}"
