"""The course of those who do nothing: one who is suspected for too long, and all of them where everybody waits.

Who is suspected core/coordinator/failure_detector.py finds.  A stage's last worker has a longer deadline than others,
and then the job ends, unless its stage can be replayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator import ends, replays
from recycle_plugin.core.coordinator.failure_detector import Suspicion
from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.coordinator.wait_graph import records, shown, wait_graph
from recycle_plugin.core.vocabulary.roster import WorkerId

if TYPE_CHECKING:
    from recycle_plugin.core.coordinator.course import Course


def act_on(course: Course, worker: WorkerId, suspicion: Suspicion, now: float, out: CoordinatorOutput) -> None:
    """Gives up a worker that has been suspected for too long, or ends the job where its stage has nobody else."""
    member, failure_detector = course.roster.member(worker), course.attendance.failure_detector
    if member is not None and course.roster.is_last(member):
        limit_s = failure_detector.deadlines.last_worker_timeout_s
        if suspicion.for_s > limit_s and not replays.why_not(course, (member.seat.stage,)):
            course.give_up(worker, suspicion.cause, f"{suspicion} (deadline {limit_s:.1f} s)", now, out)
        elif suspicion.for_s > limit_s:
            ends.end(
                course,
                f"{member}, the last worker of stage {member.seat.stage}: {suspicion} (deadline {limit_s:.1f} s). "
                f"{course.ending.safe_point}. {_say_waits(course, out)}",
                out,
            )
    elif suspicion.overdue:
        failure_detector.has_cost(suspicion.work)
        course.give_up(worker, suspicion.cause, f"{suspicion} (deadline {suspicion.limit_s:.1f} s)", now, out)


def see_standstill(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Acts where everybody waits.  Once it may be a message that was lost, and then all say again what they hold;
    twice it is a mistake that nobody here can mend.
    """
    failure_detector = course.attendance.failure_detector
    standstill_s = failure_detector.standstill_s
    if course.halted or course.ending.failed or standstill_s <= failure_detector.stall_s:
        return
    why, waits = f"everybody waits for {standstill_s:.1f} s", _say_waits(course, out)
    if course.stood_still == course.committed:
        ends.end(
            course,
            f"{why}, once more since step {course.committed} was committed. {course.ending.safe_point}. {waits}",
            out,
        )
    else:
        course.stood_still = course.committed
        out.say("warning", f"{why}, and nobody does anything: all meet again. {waits}")
        course.regroup("everybody waits", now, out)


def _say_waits(course: Course, out: CoordinatorOutput) -> str:
    """Says who waits for whom, as text and as data; returns the text."""
    edges = wait_graph(course.roster, course.attendance.failure_detector)
    out.say("wait_graph", shown(edges), edges=records(edges))
    return f"Who waits for whom: {shown(edges)}"
