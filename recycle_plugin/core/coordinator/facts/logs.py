"""What is known of a job's logs: the boundaries that they hold, what they lack, and from which checkpoint stages can be
replayed, alone or with others (core/coordinator/replays.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from recycle_plugin.core.coordinator.facts.log_places import EndedLog
from recycle_plugin.core.messages.from_coordinator import LogOnly
from recycle_plugin.core.messages.from_workers import Durable, LogBroken, Logged
from recycle_plugin.core.vocabulary.barrier import Barrier
from recycle_plugin.core.vocabulary.roster import Member, WorkerId


class Logs:
    """What is known of the logs of a job of ``stages`` stages, if any are ``kept``. ``boundaries``: those of which the
    logs have everything since the checkpoint that stages are replayed from. Invariant: workers log at least these. A
    boundary is removed here before workers are told, and counts only from the first checkpoint after all were told.
    """

    def __init__(self, kept: bool = False, stages: int = 1, boundaries: Collection[int] | None = None) -> None:
        self.kept, self._stages = kept, stages
        self.boundaries = self._told = frozenset(range(stages - 1) if boundaries is None else boundaries)
        self._unreadable: dict[int, str] = {}  # by stage of which logged data is not found: why
        self._resized = 0  # the first step with another number of micro-batches
        self._durable: Durable | None = None
        self._removed = False  # whether the checkpoint was removed
        self._broken: list[tuple[LogBroken, int]] = []  # with the worker's stage; a log may break off repeatedly
        self._until: dict[WorkerId, int] = {}  # of gone workers, the last step that they have logged
        self._written: dict[WorkerId, int] = {}  # the last step reported to be on a worker's disk
        self.passed: list[Barrier] = []  # the barriers since the last commit

    @property
    def checkpoint(self) -> Durable:
        """The checkpoint from which stages are replayed. AssertionError if there is none."""
        assert self._durable is not None, "no checkpoint is durable yet"
        return self._durable

    def behind(self, committed: int) -> int | None:
        """Return how many steps ``committed`` is past that checkpoint; None if there is none."""
        return None if self._durable is None else committed - self._durable.step

    @property
    def some(self) -> bool:
        """Whether the workers are to log only some boundaries; until they are told so, they log all."""
        return self.kept and len(self._told) < self._stages - 1

    @property
    def told(self) -> LogOnly:
        """The message that tells workers which boundaries to log."""
        return LogOnly(tuple(sorted(self._told)))

    def durable(self, message: Durable) -> bool:
        """Record that a checkpoint is durable. Return whether it is later than the last durable checkpoint."""
        if not self.kept or (self._durable is not None and message.step <= self._durable.step):
            return False
        told = self._told if message.boundaries is None else frozenset(message.boundaries)
        self.boundaries, self._told = self._told & told, told
        self._durable, self._removed = message, False
        self._unreadable.clear()
        self._until = {worker: last for worker, last in self._until.items() if last > message.step}
        self._broken = [
            (_not_before(message.step + 1, each), stage)
            for each, stage in self._broken
            if each.step > message.step or each.worker in self._until
        ]
        return True

    def removed(self, path: str) -> None:
        """Record that the checkpoint at ``path`` was removed."""
        self._removed |= self._durable is not None and self._durable.path == path

    def broken(self, message: LogBroken, stage: int) -> None:
        """Record that the log of a worker of ``stage`` lacks something of a step; once for each step."""
        if not any((each.worker, each.step) == (message.worker, message.step) for each, _ in self._broken):
            self._broken.append((message, stage))

    def heard(self, message: Logged) -> None:
        """Record how much of a worker's log is on its disk."""
        self._written[message.worker] = message.step

    def lost(self, member: Member) -> None:
        """Record that a worker is lost, and with it what was not yet on its disk."""
        worker, written = member.worker, self._written.pop(member.worker, None)
        if self.kept and written is not None:
            written = max(written, self._durable.step) if self._durable is not None else written
            why = "it was lost, and only earlier records are known to be on its disk"
            self.broken(LogBroken(worker.rank, written + 1, why, incarnation=worker.incarnation), member.seat.stage)

    def resized(self, step: int) -> None:
        """Record that from ``step`` on there is another number of micro-batches."""
        self._resized = step

    def unreadable(self, stage: int, why: str) -> None:
        """Record that something that ``stage`` has sent is in no log. ``why``: how that is known."""
        self._unreadable.setdefault(stage, why)

    def begun_anew(self, member: Member, why: str) -> None:
        """Record that ``member`` replays its stage as a companion, and ``why``. Its log is complete again."""
        self.unreadable(member.seat.stage, why)
        self._broken = [(each, stage) for each, stage in self._broken if each.worker != member.worker]

    def gone(self, ended: EndedLog) -> None:
        """Record that a lost worker's log is gone too, with everything since the last checkpoint."""
        worker, step = ended.member.worker, 1 if self._durable is None else self._durable.step + 1
        if ended.last >= step:
            self._until[worker] = ended.last
            why = f"it was on host {ended.member.host}, which is gone"
            self.broken(LogBroken(worker.rank, step, why, incarnation=worker.incarnation), ended.member.seat.stage)

    def replayed(self, by: Member, committed: int) -> None:
        """Record a replay of ``by``'s stage to step ``committed``: its logs are whole, but for what ``by`` reports."""
        stage = by.seat.stage
        self._unreadable.pop(stage, None)
        self._broken = [
            (_not_before(committed + 1, each) if its == stage and each.worker != by.worker else each, its)
            for each, its in self._broken
        ]

    def resume(self, committed: int, held: Mapping[str, Mapping[str, str]], workers: Collection[WorkerId]) -> None:
        """Record that ``workers`` go on behind ``committed`` with what they have ``held``. What a lost worker's log
        lacks of later steps is made and logged again, unless a worker of the stage already has its gradient sum. A new
        worker has nothing to log of earlier steps, or has said so.
        """
        self._written = dict.fromkeys(workers, committed) | self._written

        def made_again(each: LogBroken, stage: int) -> bool:
            sums = {f"reduced {stage}@{step}" for step in range(each.step, committed + 3)}
            return each.step > committed and not any(sums & have.keys() for have in held.values())

        self._broken = [
            (each, stage) for each, stage in self._broken if each.worker in self._written or not made_again(each, stage)
        ]

    def rewind(self) -> None:
        """Drop everything: all have loaded another state, to which no log leads."""
        self._durable = None
        self._broken.clear()
        self._unreadable.clear()
        self._until.clear()

    def why_not(self) -> str:
        """Return why no stage can be replayed, in words; "" if stages can."""
        if not self.kept:
            return "nothing is logged (recycle.log)"
        if self._durable is None:
            return "no checkpoint that a stage could be replayed from is durable yet"
        if self._removed:
            return f"its checkpoint {self._durable.path} was removed"
        if self._durable.step < self._resized - 1:
            return f"the number of micro-batches has changed at step {self._resized}, after the last checkpoint"
        return ""

    def along(self, committed: int, lost: Collection[int]) -> dict[int, str]:
        """Return the live stages that must be replayed up to ``committed`` along with the ``lost`` ones, each with the
        reason: what they have sent to a replayed stage can't be read. What replayed stages send each other is made
        again. Costs a look at each broken log for each of these stages.
        """
        found: dict[int, str] = {}
        group = list(lost)
        for stage in group:
            for other in (stage - 1, stage + 1):
                is_live = 0 <= other < self._stages and other not in group
                if is_live and (why := self._why_along(other, min(stage, other), committed)):
                    found[other] = why
                    group.append(other)
        return found

    def _why_along(self, stage: int, boundary: int, committed: int) -> str:
        if boundary not in self.boundaries:
            return f"the boundary {boundary}|{boundary + 1} is not logged"
        lacking = [each for each, its in self._broken if its == stage and each.step <= committed]
        if lacking:
            first = min(lacking, key=lambda each: (each.worker, each.step))
            return f"the log of rank {first.worker.rank} lacks records of step {first.step}: {first.why}"
        return self._unreadable.get(stage, "")


def _not_before(step: int, broken: LogBroken) -> LogBroken:
    return replace(broken, step=max(broken.step, step))
