"""The course of those who leave: planned leaves, and scripts that have ended.

* A unit leaves as one; the generation without it Course.plan_change announces.
* Scripts end after the same step: where one has ended earlier, the others would wait for it, or go on without its data,
  and the job ends.
* Whoever has gone is not waited for by those who regroup.

Where the job logs, nobody says goodbye before core/coordinator/goodbyes.py lets it go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator import ends, resuming
from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.messages.activity import WAITS
from recycle_plugin.core.messages.from_workers import Heartbeat, Leaving, Left
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.roster import Member, WorkerId

if TYPE_CHECKING:
    from recycle_plugin.core.coordinator.course import Course

UNEVEN_S = 3.0  # for so long who is through with its own part of a step may wait for scripts that end in it too


def leave(course: Course, wishes: Collection[Leaving], now: float, out: CoordinatorOutput) -> None:
    """Takes in that members want to leave, or are to, and plans for it."""
    if course.ending.ended is not None or course.ending.finishing:
        return
    news = [each.worker for each in _with_their_units(course, wishes) if course.attendance.announce(each, out)]
    for worker in news:
        course.vacancies.stay_away(worker.rank, out)
    if news:
        course.plan_change(now, out)


def _with_their_units(course: Course, wishes: Collection[Leaving]) -> Iterator[Leaving]:
    """The wishes, and for each those that are of the same unit: nobody takes part in it without the others."""
    for wish in wishes:
        member = course.roster.member(wish.worker)
        yield wish
        for other in course.attendance.together(member) if member is not None else ():
            yield Leaving(other.rank, wish.reason, incarnation=other.incarnation)


def goodbye(course: Course, message: Left, now: float, out: CoordinatorOutput) -> None:
    """Takes in that a worker has left: as planned, or since its script is through."""
    worker, member = message.worker, course.roster.member(message.worker)
    course.joining.forget(worker)
    early = message.planned and not course.ending.through(course.committed)
    if early:
        course.vacancies.left(worker)
        course.log_places.ended(worker, course.committed)
    if member is not None and not message.planned and course.ending.ended is None:
        _script_ended(course, member, message.step, now, out)
    course.attendance.leave(worker)
    if member is not None and not early:
        course.attendance.through.add(member.seat.stage)
    if early and member is not None:
        _leave_with(course, member, out)
    course.ending.goodbye(message.code, member is not None and not early)
    if course.attendance.started and not course.ending.failed:
        planned = early or course.ending.ended is not None
        out.say(
            "left",
            f"{course.attendance.named(worker.rank)} has left after step {course.committed}" + " as planned" * planned,
            rank=worker.rank,
        )
    await_without(course, member, early, now, out)
    ends.finish_if_empty(course, out)


def _leave_with(course: Course, member: Member, out: CoordinatorOutput) -> None:
    """Counts on nobody any more who is of one unit with ``member``, which has left as planned: they are about to
    do so.  Who was told meanwhile that it is to go on can't, and is ended.
    """
    for other in course.attendance.together(member)[1:]:
        course.attendance.await_goodbye(other.worker)
        if course.regrouping.counts_on(other.worker):
            out.fence(other.worker, f"{member} has left, and they go as one")


def depart(course: Course, worker: WorkerId, out: CoordinatorOutput) -> None:
    """Removes a worker whose planned leave holds, and that is gone without the goodbye: nobody needs anything of it
    any more.
    """
    course.attendance.leave(worker)
    course.vacancies.left(worker)
    course.log_places.ended(worker, course.committed)
    out.say(
        "left",
        f"{course.attendance.named(worker.rank)} has left after step {course.committed} as planned, without a word",
        rank=worker.rank,
    )
    ends.finish_if_empty(course, out)


def await_without(course: Course, member: Member | None, early: bool, now: float, out: CoordinatorOutput) -> None:
    """Goes on without ``member``, which has gone before it could hear of the membership that the others may be
    reporting for.
    """
    if member is None or not course.regrouping.counts_on(member.worker):
        return
    if not len(course.roster):
        course.regrouping.stop()
    elif not early:  # all steps are committed, and its report is not needed
        resuming.complete(course, now, out)
    elif empty := ends.empty_stage(course):
        ends.end(course, empty, out, ends.crash(course))
    else:
        course.regroup(f"planned leave of {member.seat}", now, out)


def _script_ended(course: Course, member: Member, step: int, now: float, out: CoordinatorOutput) -> None:
    """Notes that the script of ``member`` has ended after ``step``: the others' have to do so too, or they would
    wait for it, or go on without its data.  Costs one look at each worker.
    """
    course.ending.scripts_end(member, step)
    if course.pushed:
        return
    compare_scripts(course, member, step, out)
    for other in course.roster:
        last = course.attendance.failure_detector.last(other.worker)
        if last is not None:
            compare_scripts(course, other, last.step, out)


def see_uneven(course: Course, out: CoordinatorOutput) -> None:
    """Ends the job where somebody waits in a step that a script which has ended was to contribute to.  Scripts that
    push may all end in the middle of one, and then nobody waits.  Costs one look at each member.
    """
    if not (course.pushed and course.ending.finishing):
        return
    detector = course.attendance.failure_detector
    for member in course.roster:
        at, _, for_s = detector.doing(member.worker)
        last = detector.last(member.worker)
        if last is not None and at == WAITS and for_s > UNEVEN_S:
            compare_scripts(course, member, last.step, out)


def where_it_can_be(course: Course, message: Heartbeat) -> Heartbeat:
    """Drop the step of a heartbeat if nobody can have begun it: it would pass for the script's step later."""
    return message if message.step < unstarted(course.committed) else replace(message, step=0)


def compare_scripts(course: Course, member: Member, step: int, out: CoordinatorOutput) -> None:
    """Ends the job where the script of ``member``, which is at ``step``, goes on behind the step that another one has
    ended after.
    """
    uneven = course.ending.uneven(member, step)
    # what nobody can be at is no news of a script
    if uneven and step < unstarted(course.committed) and not course.ending.failed:
        ends.end(course, f"{uneven}. {course.ending.safe_point}", out)
