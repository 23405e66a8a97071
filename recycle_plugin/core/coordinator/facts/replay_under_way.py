"""Replays of empty stages that are under way (core/coordinator/replays.py): since when all wait, and who replays."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.messages.from_workers import Durable
from recycle_plugin.core.vocabulary.roster import Member, WorkerId


@dataclass
class Companion:
    """A live worker that replays its stage along. ``done``: it is at its own state again."""

    worker: WorkerId
    done: bool = False


class ReplayUnderWay:
    """The replays under way. ``waits_since``: when they were last heard of, in seconds; None without a replay.
    ``lost_at``: when the first stage lost its last worker, in seconds. ``given_up``: how many silent workers were given
    up since. ``held_back``: a checkpoint that nobody was told of meanwhile.
    """

    def __init__(self) -> None:
        self.waits_since: float | None = None
        self.lost_at = 0.0
        self.given_up = 0
        self.held_back: Durable | None = None
        self._companions: dict[int, Companion] = {}  # by stage
        self._told: dict[WorkerId, tuple[int, ...]] = {}  # the replayed stages that each worker has heard of

    def begin(self, now: float) -> None:
        """Record that all wait for an empty stage, perhaps one more."""
        if self.waits_since is None:
            self.lost_at = now
        self.waits_since = now

    @property
    def has_companions(self) -> bool:
        """Whether live workers replay along."""
        return bool(self._companions)

    @property
    def accompanied_stages(self) -> frozenset[int]:
        return frozenset(self._companions)

    def companion(self, stage: int) -> WorkerId | None:
        """Return the companion of ``stage``, or None."""
        return found.worker if (found := self._companions.get(stage)) is not None else None

    def is_companion(self, worker: WorkerId) -> bool:
        """Return whether ``worker`` replays along, or has done so."""
        return any(each.worker == worker for each in self._companions.values())

    def is_at_it(self, worker: WorkerId) -> bool:
        """Return whether ``worker`` replays along and is not done."""
        return any(each.worker == worker and not each.done for each in self._companions.values())

    def accompanies(self, member: Member) -> None:
        """Record that ``member`` replays its stage along."""
        self._companions[member.seat.stage] = Companion(member.worker)

    def accompanied(self, worker: WorkerId) -> None:
        """Record that the companion ``worker`` is done."""
        for each in self._companions.values():
            each.done |= each.worker == worker

    def tell(self, worker: WorkerId, stages: tuple[int, ...]) -> None:
        """Record which stages ``worker`` is told are replayed."""
        self._told[worker] = stages

    def told(self, worker: WorkerId) -> tuple[int, ...]:
        """Return the stages that ``worker`` was told are replayed."""
        return self._told.get(worker, ())
