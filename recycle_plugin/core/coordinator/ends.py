"""The ways in which a job comes to its end: after a step that all come to, at once, or when all have left.

How it ends core/coordinator/ending.py keeps.  Those who were coming back are sent away here too: there is nothing left
that they could take part in, or another state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator.joining import NewcomerRecord, Phase
from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.coordinator.vacancies import OVER
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, End

if TYPE_CHECKING:
    from recycle_plugin.core.coordinator.course import Course


def end_planned(course: Course, reason: str, out: CoordinatorOutput, code: int = 0, cause: str = "") -> None:
    """Ends the job after a step that all come to.  ``cause``: what has led to that.

    Where guards were killed, that is taken for it, and the script does not know: there is to be a checkpoint.
    """
    guards = ", ".join(
        f"the guard of rank {worker.rank}, process {pid}, was killed"
        for worker, pid in sorted(course.attendance.unguarded.items())
    )
    if guards:
        reason, code = f"{reason}, after {guards}", TRY_AGAIN
    if course.attendance.started:
        course.ending.plan(course.committed, reason, code, out, cause)
    else:
        end(course, reason, out)


def end(course: Course, reason: str, out: CoordinatorOutput, cause: str = "", killed: int | None = None) -> None:
    """Ends the job at once: nobody can go on.  ``killed``: a rank whose worker was killed before there was a run
    folder to say so in.
    """
    course.regrouping.stop()
    course.ending.fail(reason, out, cause, killed)
    course.vacancies.close(out)


def empty_stage(course: Course) -> str:
    """The reason why those left can't go on, if a stage has nobody; else empty."""
    empty = course.attendance.empty_stages()
    undone = f", and what its script does after step {course.committed}, the last one, is not done"
    what = undone * course.ending.finishing
    return f"stage {empty[0]} has no live worker left{what}. {course.ending.safe_point}" if empty else ""


def crash(course: Course) -> str:
    """The errors with which the scripts of those have ended who are missing in a stage that is empty."""
    empty = course.attendance.empty_stages()
    return course.attendance.crash_in(empty[0]) if empty else ""


def end_without_stage(course: Course, why: str, out: CoordinatorOutput, cause: str = "") -> None:
    """Ends the job as failed, for a stage that nobody is left in: at once, or where scripts are through already,
    once they all are.
    """
    if not course.ending.finishing:
        end(course, why, out, cause)
        return
    course.logs.waits_since = None
    course.ending.undone = course.ending.undone or why
    finish_if_empty(course, out)


def give_up_going_on(course: Course, why: str, out: CoordinatorOutput, cause: str = "") -> None:
    """Ends the job, unless all steps up to a planned end are committed.  Then this is no failure: who does nothing
    with the others any more just goes.

    But who still waits for them would wait in vain.
    """
    if not course.ending.through(course.committed):
        end_without_stage(course, why, out, cause)
    elif not course.ending.stranded:
        course.ending.stranded = why
        wanted = course.regrouping.wanted or course.barriers.waiting(course.regrouping.in_force)
        course.regrouping.stop()
        if wanted:
            end_if_stranded(course, out)


def end_if_stranded(course: Course, out: CoordinatorOutput) -> None:
    """Ends the job where somebody waits for others who can't go on, and would need nobody but for that."""
    if course.ending.stranded:
        end(course, course.ending.stranded, out)


def finish_if_empty(course: Course, out: CoordinatorOutput) -> None:
    """Takes the job for over once nobody is left, unless a stage is replayed."""
    awaited = course.logs.waits_since is not None
    if not len(course.roster) and course.attendance.started and not (course.ending.failed or awaited):
        course.steps.sum_up(out)
        if course.ending.undone:
            end(course, course.ending.undone, out)
            return
        through = [one.member.worker for one in course.joining if one.phase in (Phase.CAUGHT_UP, Phase.ANNOUNCED)]
        send_away(course, OVER, out)
        course.ending.finish(course.committed, course.attendance.crash_after(course.committed), out)
        course.vacancies.close(out, through)


def send_away(course: Course, why: str, out: CoordinatorOutput) -> None:
    """Ends all newcomers that are no members: there is nothing left that they could take part in, or another state."""
    for newcomer in course.joining:
        if newcomer.member.worker not in course.roster.workers:
            course.joining.forget(newcomer.member.worker)
            tell_away(newcomer, why, out)


def tell_away(newcomer: NewcomerRecord, why: str, out: CoordinatorOutput) -> None:
    """Ends a newcomer that nobody counts on any more, without an error."""
    out.tell(newcomer.member.worker, End(0, f"{why}, and this worker was coming back", failed=False))
