"""The words of heartbeats for what a worker is doing, read by the failure detector and the wait graph."""

from __future__ import annotations

from recycle_plugin.core.vocabulary.ids import Seat

COMPUTES, WAITS, ELSEWHERE = "computes", "waits", "is in"
LONGEST = 200  # characters of what a worker is at: a group of a thousand has a long name


def awaited(datum: object, source: Seat) -> str:
    """Return the name of a wait for ``datum`` from seat ``source``; the wait graph reads the seat from it."""
    return f"{datum} from seat {source}"
