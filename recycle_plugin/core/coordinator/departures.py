"""Workers that leave: planned leaves, and scripts that have ended.

* A unit leaves as one; core/coordinator/generations.py announces the generation without it.
* Scripts end after the same step. If one has ended earlier, the others would wait for it or go on without its data, so
  the job ends.
* A regroup does not wait for workers that have left.

In a job that logs, nobody leaves before core/coordinator/goodbyes.py allows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from recycle_plugin.core.coordinator import ends, generations
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_workers import Leaving, Left, Terminate
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.roster import Member, WorkerId


def terminate(state: JobState, message: Terminate) -> None:
    """Handle that the job is to end, as a supervisor was told."""
    who = f"the supervisor of {state.attendance.named(message.rank)} on host {message.host} got " * bool(message.host)
    _end_planned(state, f"{who}{message.reason}")


def leaving(state: JobState, message: Leaving) -> None:
    """Handle that a member wants to leave, or that all are to."""
    if message.all:
        _end_planned(state, f"{state.attendance.named(message.rank)}: {message.reason}")
    else:
        leave(state, [message])


def _end_planned(state: JobState, why: str) -> None:
    state.say("terminate", f"{why}: the job ends at the next commit")
    ends.end_planned(state, why)


def leave(state: JobState, wishes: Collection[Leaving]) -> None:
    """Record that members want to leave or are to, and plan a generation without them."""
    if state.ending.ended is not None or state.ending.finishing:
        return
    news = [each.worker for each in _with_their_units(state, wishes) if state.attendance.announce(each, state.out)]
    for worker in news:
        state.vacancies.stay_away(worker.rank, state.out)
    if news:
        generations.plan_change(state)


def _with_their_units(state: JobState, wishes: Collection[Leaving]) -> Iterator[Leaving]:
    """Yield the wishes, each followed by wishes of the same unit: no part of a unit stays alone."""
    for wish in wishes:
        member = state.roster.member(wish.worker)
        yield wish
        for other in state.attendance.together(member) if member is not None else ():
            yield Leaving(other.rank, wish.reason, incarnation=other.incarnation)


def goodbye(state: JobState, message: Left) -> None:
    """Handle that a worker has left, as planned or because its script is through."""
    worker, member = message.worker, state.roster.member(message.worker)
    state.joining.forget(worker)
    early = message.planned and not state.ending.through(state.committed)
    if early:
        state.vacancies.left(worker)
        state.log_places.ended(worker, state.committed)
    if member is not None and not message.planned and state.ending.ended is None:
        _script_ended(state, member, message.step)
    state.attendance.leave(worker)
    if member is not None and not early:
        state.attendance.through.add(member.seat.stage)
    if early and member is not None:
        _leave_with(state, member)
    state.ending.goodbye(message.code, member is not None and not early)
    if state.attendance.started and not state.ending.failed:
        planned = early or state.ending.ended is not None
        state.say(
            "left",
            f"{state.attendance.named(worker.rank)} has left after step {state.committed}" + " as planned" * planned,
            rank=worker.rank,
        )
    await_without(state, member, early)
    ends.finish_if_empty(state)


def _leave_with(state: JobState, member: Member) -> None:
    """Await the goodbyes of the rest of the unit of ``member``, which has left; fence those told to go on."""
    for other in state.attendance.together(member)[1:]:
        state.attendance.await_goodbye(other.worker)
        if state.regrouping.counts_on(other.worker):
            state.fence(other.worker, f"{member} has left, and this worker leaves with it")


def depart(state: JobState, worker: WorkerId) -> None:
    """Remove a worker whose planned leave holds and that is gone without a goodbye. No other worker needs it."""
    state.attendance.leave(worker)
    state.vacancies.left(worker)
    state.log_places.ended(worker, state.committed)
    state.say(
        "left",
        f"{state.attendance.named(worker.rank)} has left after step {state.committed} as planned, without a goodbye",
        rank=worker.rank,
    )
    ends.finish_if_empty(state)


def await_without(state: JobState, member: Member | None, early: bool) -> None:
    """Go on without ``member``, which left before it could report for the generation under way."""
    if member is None or not state.regrouping.counts_on(member.worker):
        return
    if not len(state.roster):
        state.regrouping.stop()
    elif not early:  # all steps are committed: its report is not needed
        state.left_midway = True
    elif empty := ends.empty_stage(state):
        ends.end(state, empty, ends.crash(state))
    else:
        generations.regroup(state, f"planned leave of {member.seat}")


def _script_ended(state: JobState, member: Member, step: int) -> None:
    """Record that the script of ``member`` has ended after ``step``, and compare it with the first that has ended. That
    one is compared with all: O(members), once.
    """
    first = state.ending.scripts_end(member, step)
    if state.pushed:
        return
    compare_scripts(state, member, step)
    for other in state.roster if first else ():
        last = state.attendance.failure_detector.last(other.worker)
        if last is not None:
            compare_scripts(state, other, last.step)


def see_uneven(state: JobState) -> None:
    """End the job if somebody waits in a step that an ended script was to contribute to. Costs one look at each member.
    Only for scripts that push: all of them may end in the middle of a step, and then nobody waits.
    """
    if not (state.pushed and state.ending.finishing):
        return
    detector = state.attendance.failure_detector
    for member in state.roster:
        last = detector.last(member.worker)
        if last is not None and detector.waits_in_vain(member.worker):
            compare_scripts(state, member, last.step)


def compare_scripts(state: JobState, member: Member, step: int) -> None:
    """End the job if the script of ``member``, at ``step``, goes on past the step at which another script ended."""
    uneven = state.ending.uneven(member, step)
    # a step that nobody can be in says nothing of a script
    if uneven and step < unstarted(state.committed) and not state.ending.failed:
        ends.end(state, f"{uneven}. {state.ending.safe_point}")
