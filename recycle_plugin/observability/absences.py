"""Absences of workers from their seats, and how they ended, as the event log records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, Self

from recycle_plugin.core.vocabulary.describe import UNCONFIRMED
from recycle_plugin.core.vocabulary.ids import Seat


@dataclass(frozen=True)
class Absence:
    """A seat without a worker after a loss or a ``planned`` leave, up to its next worker's return if there was one.

    ``how``: the cause as first reported; ``confirmed``: what the supervisor saw. Times are seconds since the epoch,
    None if that did not happen. ``restarted_at``: the next process was ordered; ``came_at``: its script reached its
    first step; ``caught_up_at``: it had its stage's state, ``bytes`` in all; ``back_at``: it got work, from step
    ``back_step`` on. After a replay: ``restored_at``: it had a checkpoint's state; ``replayed_at``: it had replayed the
    ``replayed_steps`` after the checkpoint, with ``helpers`` other workers.
    """

    seat: Seat
    rank: int
    how: str
    gone_at: float
    confirmed: str = ""
    restarted_at: float | None = None
    came_at: float | None = None
    caught_up_at: float | None = None
    bytes: int = 0
    restored_at: float | None = None
    replayed_at: float | None = None
    replayed_steps: int = 0
    helpers: int = 0
    back_at: float | None = None
    back_step: int = 0
    planned: bool = False

    @property
    def why(self) -> str:
        """Why the worker is gone. The first observation is left out if the supervisor has reported more."""
        if not self.confirmed:
            return self.how
        confirmed = f"{self.confirmed}, says its supervisor"
        return confirmed if self.how in UNCONFIRMED else f"{self.how}; {confirmed}"

    @property
    def is_over(self) -> bool:
        return self.back_at is not None

    @property
    def lasted_s(self) -> float:
        """Seconds until the seat had a worker again, NaN if it has none."""
        return (self.back_at or nan) - self.gone_at

    @property
    def replayed(self) -> str:
        """The replay that restored the stage's state, in words; "" if peers had the state."""
        steps = self.replayed_steps
        return f"{steps} step{'s' * (steps != 1)} of its stage replayed" if self.replayed_at is not None else ""

    def heard(self, event: Mapping[str, Any]) -> Self:
        """Return this absence updated by an event of its rank; the last of several newcomers counts."""
        match event["event"]:
            case "confirmed":
                return replace(self, confirmed=event["how"])
            case "restart":
                return replace(self, restarted_at=event["time"], came_at=None, caught_up_at=None, replayed_at=None)
            case "newcomer":
                return replace(self, came_at=event["time"], caught_up_at=None, replayed_at=None)
            case "caught_up":
                return replace(self, caught_up_at=event["time"], bytes=event["bytes"])
            case "restored":
                return replace(self, restored_at=event["time"], replayed_at=None)
            case "replayed":
                steps, helpers = event["steps"], event.get("helpers", 0)
                at, size = event["time"], event["bytes"]
                return replace(self, replayed_at=at, replayed_steps=steps, helpers=helpers, bytes=size)
            case "rejoined":
                return replace(self, back_at=event["time"], back_step=event["step"])
        return self


def absences(events: Sequence[Mapping[str, Any]]) -> dict[int, Absence]:
    """Return the absences of a run, keyed by the position in ``events`` of the loss or the planned leave."""
    found: dict[int, Absence] = {}
    under_way: dict[int, int] = {}  # {rank: position of its absence}
    leaving: dict[int, Mapping[str, Any]] = {}  # {rank: its event}
    for place, event in enumerate(events):
        rank = event.get("rank", -1)
        if event["event"] == "lost":
            leaving.pop(rank, None)
            found[place] = Absence(Seat.parse(event["seat"]), rank, event["how"], event["time"])
            under_way[rank] = place
        elif event["event"] == "leaving":
            leaving[rank] = event
        elif event["event"] == "left" and rank in leaving:
            said = leaving.pop(rank)
            found[place] = Absence(Seat.parse(said["seat"]), rank, said["why"], event["time"], planned=True)
            under_way[rank] = place
        elif rank in under_way:
            heard = found[under_way[rank]] = found[under_way[rank]].heard(event)
            if heard.is_over:
                del under_way[rank]
    return found
