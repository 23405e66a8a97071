"""The course of a generation from its members' reports on: they go on together once all have reported who still can.

What the reports say core/coordinator/regrouping.py keeps.  What all have in common is committed, and what is left of a
step is finished from what is held (core/vocabulary/recovery_plan.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator import contributing, ends, recovery_ways, returns
from recycle_plugin.core.coordinator.output import WORKERS, CoordinatorOutput
from recycle_plugin.core.coordinator.places import ended_iterators
from recycle_plugin.core.coordinator.regrouping import Reports
from recycle_plugin.core.messages.from_coordinator import Resume
from recycle_plugin.core.messages.from_workers import SurvivorReport
from recycle_plugin.core.vocabulary.causes import Cause

if TYPE_CHECKING:
    from recycle_plugin.core.coordinator.course import Course


def report(course: Course, message: SurvivorReport, now: float, out: CoordinatorOutput) -> None:
    """Takes in a survivor's report, and goes on once everybody has reported who still can."""
    course.attendance.failure_detector.ran(message.worker)
    returns.enter(course, message, out)
    if course.regrouping.add(message):
        ends.end_if_stranded(course, out)
        complete(course, now, out)


def overdue(course: Course, seconds: float, out: CoordinatorOutput) -> None:
    """Ends the job if ``seconds`` after a regrouping began somebody has not reported, who is not to wait."""
    if course.logs.waits_since is not None or course.ending.finishing:
        return
    why = course.regrouping.overdue(course.attendance.left, seconds)
    if why is not None:
        ends.end(course, why, out)


def complete(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Goes on if everybody has reported who still can.  Where the reports contradict each other, those go that
    contradict most of the others, or the job ends.
    """
    reports = course.regrouping.complete(course.roster)
    if reports is None or _calls_off(course, reports, now, out):
        return
    for worker, why in reports.odd.items():
        course.give_up(worker, Cause.CONFUSED, why, now, out)
    if reports.odd:
        return
    contradiction = reports.contradiction()
    if contradiction is not None:
        ends.end(course, contradiction, out)
    else:
        _go_on(course, reports, now, out)


def _calls_off(course: Course, reports: Reports, now: float, out: CoordinatorOutput) -> bool:
    """Whether the members, who have all reported, do not go on yet, since somebody is announced: without who has not
    been compared by now, or only once all who come have reported too.
    """
    if unproven := course.joining.unproven(reports.generation.roster):
        seats = dict.fromkeys(str(each.seat) for each in unproven)
        course.regroup(f"{', '.join(seats)} not back yet: its state is not compared", now, out)
        return True
    return course.joining.awaits(reports.generation.roster, course.attendance.failure_detector.clock)


def _go_on(course: Course, reports: Reports, now: float, out: CoordinatorOutput) -> None:
    generation, held = reports.generation, reports.holdings
    if reports.loaded:
        returns.loaded(course, out)
        course.logs.rewind()
        course.steps.rewind(reports.counts[0], out)
        course.attendance.failure_detector.rewind(reports.counts[0])
        course.places.rewind()
    committed, norm, rejected = course.steps.agree(generation.number, reports.counts, held, reports.all_valid_from)
    course.regrouping.agreed(generation)
    before, batches = course.batches, contributing.batches_behind(course, committed, reports)
    of_each = {step: (before if step <= committed else batches).of(step) for step in course.steps.unfinished}
    micro_batches = course.attendance.micro_batches
    course.places.agree(reports, course.committed, {} if course.pushed else of_each, micro_batches)
    if course.pushed and course.shrinks:
        course.places.count_whole(reports, of_each, micro_batches)
    if committed > course.committed:
        course.commit(committed, now, out)
    course.batches = batches
    if batches.replicas != before.replicas:
        contributing.say_batches(course, out)
    course.attendance.agreed(generation.roster)
    returns.come_in_force(course, now, out)
    course.attendance.failure_detector.regrouped()
    course.steps.resume(course.roster, committed)
    course.logs.resume(committed, held, course.roster.workers)
    places = {str(replica): place for replica, place in course.places.known(reports).items()}
    ended, unfilled = ended_iterators(reports), course.places.unfilled(reports, committed)
    if unfilled:
        contributing.leave_out(course, unfilled, out)
    data = (
        reports.held_draws,
        tuple(sorted(reports.placed)),
        places,
        {str(one): ended[one] for one in ended},
        unfilled,
    )
    decided = course.batches if course.shrinks else None
    course.plan_again(committed, now, out)
    out.tell(WORKERS, Resume(generation.number, committed, held, norm, rejected, *data, decided))
    if course.batches.void:
        assert course.job is not None, "a job that trains has begun"
        course.steps.without(course.batches, course.job.micro_batches, out)
    share = course.batches.share(committed + 1)
    throughput = course.throughput.share(reports.slowest.period_us, share)
    if course.unsaid:
        recovery_ways.say_rerouted(course, out)
    _say_resume(course, reports, committed, throughput, now, out)
    returns.compare(course, now, out)
    course.plan_change(now, out)
    course.compare_replicas(now, out)


def _say_resume(
    course: Course, reports: Reports, committed: int, throughput: float, now: float, out: CoordinatorOutput
) -> None:
    slowest, ahead = reports.slowest, max(reports.counts) - committed
    out.say(
        "resume",
        f"{len(course.roster)} workers go on with step {committed + 1}" + "; some have applied it" * bool(ahead),
        generation=reports.generation.number,
        committed=committed,
        ahead=ahead,
        regroup_s=round(now - reports.generation.at, 4),
        digest=slowest.digest,
        timings=slowest.timings,
        throughput=throughput,
        period_us=slowest.period_us,
        bound_us=slowest.bound_us,
    )
