"""Generations of the membership: when one is published, when it holds, and who becomes a member by it.

* A loss makes a generation of those left, which holds at once. Several losses among many make one or two.
* A planned leave or a return makes one that holds from a step that nobody can have started. If a loss comes first, it
  is announced again.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import ends
from recycle_plugin.core.coordinator.facts.joining import NewcomerRecord
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN
from recycle_plugin.core.vocabulary.commit_rule import unstarted

MANY = 256  # among fewer members each loss is told at once: a regroup takes less than a tick


def regroup(state: JobState, cause: str, from_step: int = 0, keeps_plan: bool = False) -> None:
    """Publish the membership as a new generation. With ``from_step`` leaving workers stay members until that step, and
    newcomers join then. ``keeps_plan``: nobody is lost, so a generation planned for a later step is announced again,
    for the same step.
    """
    planned, state.put_off = state.regrouping.planned, None
    slowness = tuple(sorted(state.steps.slowness.percent.items()))
    if from_step:
        roster = state.joining.planned(state.attendance.staying)
        state.joining.announced(state.regrouping.generation + 1, roster, from_step)
    elif keeps_plan and planned is not None:
        state.put_off, roster = planned, state.roster
    else:
        _leave_out(state)
        roster = state.attendance.roster = state.joining.called_off(state.roster)
    state.regrouping.publish(roster, from_step, cause, state.now, slowness, state.out)


def _leave_out(state: JobState) -> None:
    """Make newcomers again of members that have entered a generation which is replaced before it came in force."""
    for newcomer in state.joining.left_out(state.roster):
        state.vacancies.left_out(newcomer.member.worker)
        state.attendance.failure_detector.dismiss(newcomer.member.worker)


def plan_again(state: JobState, committed: int) -> None:
    """Announce again the generation that was planned before a rejection, for the same step if it is after
    ``committed``. This comes before any worker is told to go on, so no worker begins that step without knowing.
    Otherwise repeated rejections would keep the workers out, or in, for good.
    """
    if (planned := state.put_off) is not None and planned.from_step > committed:
        regroup(state, planned.cause, from_step=planned.from_step)
    state.put_off = None


def plan_change(state: JobState) -> None:
    """Announce a generation without leaving workers and with returning workers, from a step that no worker can have
    begun.

    It never replaces a planned generation whose step may have come: a worker that leaves by that generation may be
    gone, and no other membership in force is without it. This function is called again once that generation has come
    about. In a large job a change to another planned generation waits for the next tick.
    """
    if state.regrouping.planned is not None and len(state.roster) >= MANY:
        state.regrouping.plans_more = True
    else:
        _plan_change(state)


def _plan_change(state: JobState) -> None:
    state.regrouping.plans_more = False
    leaves, joins = state.attendance.leaving & state.roster.workers, state.joining.ready()
    if not (leaves or joins) or state.halted or state.ending.finishing or state.regrouping.has_come(state.committed):
        return
    if state.ending.ended is not None and not leaves:
        return
    stay = state.attendance.staying
    empty = state.attendance.empty_in(stay)
    if empty:
        why = f"stage {empty[0]} would have no worker left"
        ends.end_planned(state, why, TRY_AGAIN, state.attendance.why_leaving)
        return
    changes = {
        "planned leave of": {member.seat for member in stay.leaves(state.roster)},
        "return of": {each.seat for each in joins},
    }
    if state.regrouping.plans(state.joining.planned(stay)):
        return
    cause = "; ".join(f"{what} {', '.join(map(str, sorted(seats)))}" for what, seats in changes.items() if seats)
    regroup(state, cause, from_step=unstarted(state.committed))


def go_on_without(state: JobState, cause: str) -> None:
    """Regroup if those left are enough. A known death can make them so. Among many, those that are lost while a regroup
    is under way are left out together at the next tick.
    """
    if not state.attendance.enough():
        state.regrouping.stop()
        return
    state.ending.stranded = ""
    if state.regrouping.at_once is not None and len(state.roster) >= MANY:
        state.regrouping.put_off(cause)
    else:
        regroup(state, cause)


def follow(state: JobState) -> None:
    """Publish the generations that were put off, if any."""
    if cause := state.regrouping.behind:
        regroup(state, cause)
    if state.regrouping.plans_more:
        _plan_change(state)


def admit(state: JobState, newcomer: NewcomerRecord) -> None:
    """Record and report that a newcomer is a member like all."""
    member = newcomer.member
    state.vacancies.admitted(member.worker, state.committed)
    state.say(
        "rejoined",
        f"{member} has its stage's state after the last step, {state.committed}, and its script runs to its end"
        if state.ending.finishing
        else f"{member} takes part again from step {state.committed + 1} on",
        seat=str(member.seat),
        rank=member.rank,
        incarnation=member.incarnation,
        step=state.committed + 1,
    )
