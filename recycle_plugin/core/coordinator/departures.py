"""Those who leave: planned leaves, and scripts that have ended.

* A unit leaves as one; the generation without it core/coordinator/generations.py announces.
* Scripts end after the same step: where one has ended earlier, the others would wait for it, or go on without its data,
  and the job ends.
* Whoever has gone is not waited for by those who regroup.

Where the job logs, nobody says goodbye before core/coordinator/goodbyes.py lets it go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from recycle_plugin.core.coordinator import ends, generations
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.activity import WAITS
from recycle_plugin.core.messages.from_workers import Leaving, Left, Terminate
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.roster import Member, WorkerId

UNEVEN_S = 3.0  # for so long who is through with its own part of a step may wait for scripts that end in it too


def terminate(state: JobState, message: Terminate) -> None:
    """Takes in that the job is to end, as a supervisor has been told."""
    who = f"the supervisor of {state.attendance.named(message.rank)} on host {message.host} got " * bool(message.host)
    _end_planned(state, f"{who}{message.reason}")


def leaving(state: JobState, message: Leaving) -> None:
    """Takes in that a member wants to leave, or that all are to."""
    if message.all:
        _end_planned(state, f"{state.attendance.named(message.rank)}: {message.reason}")
    else:
        leave(state, [message])


def _end_planned(state: JobState, why: str) -> None:
    state.say("terminate", f"{why}: the job ends at the next commit")
    ends.end_planned(state, why)


def leave(state: JobState, wishes: Collection[Leaving]) -> None:
    """Takes in that members want to leave, or are to, and plans for it."""
    if state.ending.ended is not None or state.ending.finishing:
        return
    news = [each.worker for each in _with_their_units(state, wishes) if state.attendance.announce(each, state.out)]
    for worker in news:
        state.vacancies.stay_away(worker.rank, state.out)
    if news:
        generations.plan_change(state)


def _with_their_units(state: JobState, wishes: Collection[Leaving]) -> Iterator[Leaving]:
    """The wishes, and for each those that are of the same unit: nobody takes part in it without the others."""
    for wish in wishes:
        member = state.roster.member(wish.worker)
        yield wish
        for other in state.attendance.together(member) if member is not None else ():
            yield Leaving(other.rank, wish.reason, incarnation=other.incarnation)


def goodbye(state: JobState, message: Left) -> None:
    """Takes in that a worker has left: as planned, or since its script is through."""
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
    """Counts on nobody any more who is of one unit with ``member``, which has left as planned: they are about to
    do so.  Who was told meanwhile that it is to go on can't, and is ended.
    """
    for other in state.attendance.together(member)[1:]:
        state.attendance.await_goodbye(other.worker)
        if state.regrouping.counts_on(other.worker):
            state.fence(other.worker, f"{member} has left, and they go as one")


def depart(state: JobState, worker: WorkerId) -> None:
    """Removes a worker whose planned leave holds, and that is gone without the goodbye: nobody needs anything of it
    any more.
    """
    state.attendance.leave(worker)
    state.vacancies.left(worker)
    state.log_places.ended(worker, state.committed)
    state.say(
        "left",
        f"{state.attendance.named(worker.rank)} has left after step {state.committed} as planned, without a word",
        rank=worker.rank,
    )
    ends.finish_if_empty(state)


def await_without(state: JobState, member: Member | None, early: bool) -> None:
    """Goes on without ``member``, which has gone before it could hear of the membership that the others may be
    reporting for.
    """
    if member is None or not state.regrouping.counts_on(member.worker):
        return
    if not len(state.roster):
        state.regrouping.stop()
    elif not early:  # all steps are committed, and its report is not needed
        state.left_midway = True
    elif empty := ends.empty_stage(state):
        ends.end(state, empty, ends.crash(state))
    else:
        generations.regroup(state, f"planned leave of {member.seat}")


def _script_ended(state: JobState, member: Member, step: int) -> None:
    """Notes that the script of ``member`` has ended after ``step``: the others' have to do so too, or they would
    wait for it, or go on without its data.  Costs one look at each worker.
    """
    state.ending.scripts_end(member, step)
    if state.pushed:
        return
    compare_scripts(state, member, step)
    for other in state.roster:
        last = state.attendance.failure_detector.last(other.worker)
        if last is not None:
            compare_scripts(state, other, last.step)


def see_uneven(state: JobState) -> None:
    """Ends the job where somebody waits in a step that a script which has ended was to contribute to.  Scripts that
    push may all end in the middle of one, and then nobody waits.  Costs one look at each member.
    """
    if not (state.pushed and state.ending.finishing):
        return
    detector = state.attendance.failure_detector
    for member in state.roster:
        at, _, for_s = detector.doing(member.worker)
        last = detector.last(member.worker)
        if last is not None and at == WAITS and for_s > UNEVEN_S:
            compare_scripts(state, member, last.step)


def compare_scripts(state: JobState, member: Member, step: int) -> None:
    """Ends the job where the script of ``member``, which is at ``step``, goes on behind the step that another one has
    ended after.
    """
    uneven = state.ending.uneven(member, step)
    # what nobody can be at is no news of a script
    if uneven and step < unstarted(state.committed) and not state.ending.failed:
        ends.end(state, f"{uneven}. {state.ending.safe_point}")
