"""Suspicion before eviction: events about workers that owe something, and about those that go on after all."""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts.attendance import Attendance
from recycle_plugin.core.coordinator.facts.failure_detector import Suspicion
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.vocabulary.roster import Member, WorkerId


class Suspicions:
    """The reported suspicions: each is reported once when it is raised, and once when it is cleared."""

    def __init__(self) -> None:
        self._said: dict[WorkerId, Suspicion] = {}

    def update(self, found: dict[WorkerId, Suspicion], attendance: Attendance, out: CoordinatorOutput) -> None:
        """Report which suspicions are new in ``found``, all that there are now, and which earlier ones have cleared."""
        for worker, suspicion in found.items():
            member = attendance.roster.member(worker)
            if worker not in self._said and member is not None:
                self._raise(suspicion, member, attendance, out)
        for worker, suspicion in self._said.items():
            member = attendance.roster.member(worker)
            if worker not in found and member is not None:
                out.say(
                    "cleared",
                    f"{member} goes on after {suspicion.for_s:.1f} s",
                    seat=str(member.seat),
                    rank=member.rank,
                )
        self._said = found

    @staticmethod
    def _raise(suspicion: Suspicion, member: Member, attendance: Attendance, out: CoordinatorOutput) -> None:
        if attendance.roster.is_last(member):
            end_s = attendance.failure_detector.deadlines.last_worker_timeout_s
            then = (
                f"it is the last worker of stage {member.seat.stage}, so it is not given up, "
                f"and the job ends after {end_s:g} s"
            )
        else:
            then = f"it is given up after {suspicion.limit_s:.1f} s"
        out.say(
            "suspected",
            f"{member}: {suspicion}; {then}",
            seat=str(member.seat),
            rank=member.rank,
            cause=suspicion.cause.value,
            what=suspicion.what,
            for_s=round(suspicion.for_s, 3),
            limit_s=round(suspicion.limit_s, 3),
        )
