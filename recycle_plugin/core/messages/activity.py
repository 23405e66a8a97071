"""A worker's activity as its heartbeats report it; read by the failure detector and the wait graph."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction

LONGEST = 200  # characters of what a worker is at
MOST = 64  # ranks that one wait names: more are sent as all


class At(StrEnum):
    """How a worker spends its time. STOPPED and SILENT are the failure detector's judgement, for want of heartbeats."""

    COMPUTES = "computes"
    WAITS = "waits"
    ELSEWHERE = "is in"
    STOPPED = "is stopped"
    SILENT = "says nothing"


COMPUTES, WAITS, ELSEWHERE = At.COMPUTES, At.WAITS, At.ELSEWHERE


class Activity(NamedTuple):
    """A worker computes, waits for or is in ``what``, an instruction or words. It waits for the workers of ``seat``, or
    for those of ``ranks``; without both, for all that do not wait for the same.
    """

    at: At
    what: str | Instruction = ""
    seat: Seat | None = None
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return str(self.what)

    @classmethod
    def of(cls, at: At, what: object) -> Activity:
        """Return ``what``, or the result of calling it, if that is an activity; else that instruction or text, which a
        worker is ``at``. Texts and groups are cut to what is sent.
        """
        found = what() if callable(what) else what
        if isinstance(found, Instruction):
            return cls(at, found)
        made = found if isinstance(found, Activity) else cls(at, str(found))
        return made._replace(what=str(made)[:LONGEST], ranks=made.ranks if len(made.ranks) <= MOST else ())


Awaited = str | Activity | Callable[[], str | Activity]
"""What a worker waits for: an activity or a text, or what makes it once somebody asks."""


def awaited(datum: object, source: Seat, again: bool = False) -> Activity:
    """Return the wait for ``datum`` from seat ``source``, which has been asked to send it ``again``."""
    return Activity(WAITS, f"{datum} from seat {source}{', once more' * again}", source)
