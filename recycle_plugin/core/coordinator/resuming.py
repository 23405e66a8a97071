"""A generation from its members' reports on: they go on together once all have reported that still can.
core/coordinator/facts/regrouping.py keeps the reports. Steps that all have applied are committed, and the rest of a
step is finished from what is held (core/vocabulary/recovery_plan.py).
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import (
    commits,
    comparisons,
    contributing,
    ends,
    generations,
    losses,
    recovery_ways,
    returns,
)
from recycle_plugin.core.coordinator.facts.output import WORKERS
from recycle_plugin.core.coordinator.facts.places import ended_iterators
from recycle_plugin.core.coordinator.facts.regrouping import Reports
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import Resume
from recycle_plugin.core.messages.from_workers import SurvivorReport
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.packed_data import among_all


def report(state: JobState, message: SurvivorReport) -> None:
    """Record a survivor's report, and go on once all have reported that still can."""
    state.attendance.failure_detector.ran(message.worker)
    returns.enter(state, message)
    if state.regrouping.add(message):
        ends.end_if_stranded(state)
        complete(state)


def overdue(state: JobState, seconds: float) -> None:
    """End the job if a report is missing ``seconds`` after a regroup began, unless all are to wait."""
    if state.replay.waits_since is not None or state.ending.finishing:
        return
    why = state.regrouping.overdue(state.attendance.left, seconds)
    if why is not None:
        ends.end(state, why)


def complete(state: JobState) -> None:
    """Go on if all have reported that still can. On contradictions, give up the minority, or end the job."""
    reports = state.regrouping.complete(state.roster)
    if reports is None or _calls_off(state, reports):
        return
    for worker, why in reports.odd.items():
        losses.give_up(state, worker, Cause.CONFUSED, why)
    if reports.odd:
        return
    contradiction = reports.contradiction()
    if contradiction is not None:
        ends.end(state, contradiction)
    else:
        _go_on(state, reports)


def _calls_off(state: JobState, reports: Reports) -> bool:
    """Return whether the members, which have all reported, do not go on yet because of announced newcomers: a
    generation without unproven ones is published, or others still have to report.
    """
    if unproven := state.joining.unproven(reports.generation.roster):
        seats = dict.fromkeys(str(each.seat) for each in unproven)
        generations.regroup(state, f"{', '.join(seats)} not back yet: its state is not compared")
        return True
    return state.joining.awaits(reports.generation.roster, state.attendance.failure_detector.clock)


def _go_on(state: JobState, reports: Reports) -> None:
    generation, held = reports.generation, reports.holdings
    if reports.loaded:
        returns.loaded(state)
        state.logs.rewind()
        state.steps.rewind(reports.counts[0], state.out)
        state.attendance.failure_detector.rewind(reports.counts[0])
        state.places.rewind()
    committed, norm, rejected = state.steps.agree(generation.number, reports.counts, held, reports.all_valid_from)
    assert state.job is not None, "a job that trains has begun"
    state.steps.lose(committed, held, state.job.stages - 1)
    before, batches = state.batches, contributing.batches_behind(state, committed, reports)
    state.regrouping.agreed(generation)
    of_each = {step: (before if step <= committed else batches).of(step) for step in state.steps.unfinished}
    micro_batches = state.attendance.micro_batches
    state.places.agree(reports, state.committed, {} if state.pushed else of_each, micro_batches)
    if state.pushed and state.shrinks:
        state.places.count_whole(reports, of_each, micro_batches)
    if committed > state.committed:
        commits.commit(state, committed)
    state.batches = batches
    if batches.replicas != before.replicas:
        contributing.say_batches(state)
    state.attendance.agreed(generation.roster)
    returns.come_in_force(state)
    state.attendance.failure_detector.regrouped()
    state.steps.resume(state.roster, committed)
    state.logs.resume(committed, held, state.roster.workers)
    places = {str(replica): place for replica, place in state.places.known(reports).items()}
    ended, unfilled = ended_iterators(reports), state.places.unfilled(reports, committed)
    if unfilled:
        contributing.leave_out(state, unfilled)
    data = (
        reports.held_draws,
        tuple(sorted(reports.placed)),
        places,
        {str(one): ended[one] for one in ended},
        unfilled,
    )
    decided = state.batches if state.shrinks else None
    generations.plan_again(state, committed)
    state.tell(WORKERS, Resume(generation.number, committed, among_all(held), norm, rejected, *data, decided))
    if state.shrinks:
        state.steps.without(state.batches, state.job.micro_batches, state.out)
    share = state.batches.share(committed + 1)
    throughput = state.throughput.share(reports.slowest.period_us, share)
    if state.unsaid:
        recovery_ways.say_rerouted(state)
    _say_resume(state, reports, committed, throughput)
    comparisons.newcomers(state)
    generations.plan_change(state)
    comparisons.replicas(state)


def _say_resume(state: JobState, reports: Reports, committed: int, throughput: float) -> None:
    slowest, ahead = reports.slowest, max(reports.counts) - committed
    state.say(
        "resume",
        f"{len(state.roster)} workers go on with step {committed + 1}"
        + ", which some have applied already" * bool(ahead),
        generation=reports.generation.number,
        committed=committed,
        ahead=ahead,
        regroup_s=round(state.now - reports.generation.at, 4),
        digest=slowest.digest,
        timings=slowest.timings,
        throughput=throughput,
        period_us=slowest.period_us,
        bound_us=slowest.bound_us,
    )
