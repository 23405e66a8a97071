"""Replays under way of stages that have nobody (core/coordinator/replays.py): since when all wait, and who replays."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.messages.from_workers import Durable
from recycle_plugin.core.vocabulary.roster import Member, WorkerId


@dataclass
class Companion:
    """A live worker that replays its stage along; ``done``: it has come to its own state again."""

    worker: WorkerId
    done: bool = False


class ReplayUnderWay:
    """The replays under way.  ``waits_since``: since when, in seconds, nothing has been heard of them; None where there
    are none.  ``lost_at``: when the first of the stages lost its last worker, in seconds; ``given_up``: how often
    somebody was given up since then that was silent for too long; ``held_back``: the checkpoint that nobody was told of
    meanwhile.
    """

    def __init__(self) -> None:
        self.waits_since: float | None = None
        self.lost_at = 0.0
        self.given_up = 0
        self.held_back: Durable | None = None
        self._companions: dict[int, Companion] = {}  # by stage
        self._told: dict[WorkerId, tuple[int, ...]] = {}  # the replayed stages that each worker was told of

    def begin(self, now: float) -> None:
        """Takes in that all wait for a stage, for another one perhaps."""
        if self.waits_since is None:
            self.lost_at = now
        self.waits_since = now

    @property
    def has_companions(self) -> bool:
        """Whether live workers replay along."""
        return bool(self._companions)

    @property
    def accompanied_stages(self) -> frozenset[int]:
        """The live stages that are replayed along."""
        return frozenset(self._companions)

    def companion(self, stage: int) -> WorkerId | None:
        """Who replays ``stage`` along, if anybody."""
        return found.worker if (found := self._companions.get(stage)) is not None else None

    def is_companion(self, worker: WorkerId) -> bool:
        """Whether ``worker`` replays along, or has done so."""
        return any(each.worker == worker for each in self._companions.values())

    def is_at_it(self, worker: WorkerId) -> bool:
        """Whether ``worker`` replays along, and has not said yet that it has."""
        return any(each.worker == worker and not each.done for each in self._companions.values())

    def accompanies(self, member: Member) -> None:
        """Takes in that ``member`` replays its stage along."""
        self._companions[member.seat.stage] = Companion(member.worker)

    def accompanied(self, worker: WorkerId) -> None:
        """Takes in that ``worker`` has done so."""
        for each in self._companions.values():
            each.done |= each.worker == worker

    def tell(self, worker: WorkerId, stages: tuple[int, ...]) -> None:
        """Notes which stages ``worker`` hears are replayed."""
        self._told[worker] = stages

    def told(self, worker: WorkerId) -> tuple[int, ...]:
        """The stages that ``worker`` has heard are replayed."""
        return self._told.get(worker, ())
