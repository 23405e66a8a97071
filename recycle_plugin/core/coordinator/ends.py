"""The ways in which a job comes to its end: after a step that all come to, at once, or when all have left.

How it ends core/coordinator/facts/ending.py keeps.  Those who were coming back are sent away here too: there is nothing
left that they could take part in, or another state.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts.joining import NewcomerRecord, Phase
from recycle_plugin.core.coordinator.facts.vacancies import OVER
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, End


def end_planned(state: JobState, reason: str, code: int = 0, cause: str = "") -> None:
    """Ends the job after a step that all come to.  ``cause``: what has led to that.

    Where guards were killed, that is taken for it, and the script does not know: there is to be a checkpoint.
    """
    guards = ", ".join(
        f"the guard of rank {worker.rank}, process {pid}, was killed"
        for worker, pid in state.attendance.killed_guards.items()
    )
    if guards:
        reason, code = f"{reason}, after {guards}", TRY_AGAIN
    if state.attendance.started:
        state.ending.plan(state.committed, reason, code, state.out, cause)
    else:
        end(state, reason)


def end(state: JobState, reason: str, cause: str = "", killed: int | None = None) -> None:
    """Ends the job at once: nobody can go on.  ``killed``: a rank whose worker was killed before there was a run
    folder to say so in.
    """
    state.regrouping.stop()
    state.ending.fail(reason, state.out, cause, killed)
    state.vacancies.close(state.out)


def empty_stage(state: JobState) -> str:
    """The reason why those left can't go on, if a stage has nobody; else empty."""
    empty = state.attendance.empty_stages()
    undone = f", and what its script does after step {state.committed}, the last one, is not done"
    what = undone * state.ending.finishing
    return f"stage {empty[0]} has no live worker left{what}. {state.ending.safe_point}" if empty else ""


def crash(state: JobState) -> str:
    """The errors with which the scripts of those have ended who are missing in a stage that is empty."""
    empty = state.attendance.empty_stages()
    return state.attendance.crash_in(empty[0]) if empty else ""


def end_without_stage(state: JobState, why: str, cause: str = "") -> None:
    """Ends the job as failed, for a stage that nobody is left in: at once, or where scripts are through already,
    once they all are.
    """
    if not state.ending.finishing:
        end(state, why, cause)
        return
    state.replay.waits_since = None
    state.ending.undone = state.ending.undone or why
    finish_if_empty(state)


def give_up_going_on(state: JobState, why: str, cause: str = "") -> None:
    """Ends the job, unless all steps up to a planned end are committed.  Then this is no failure: who does nothing
    with the others any more just goes.

    But who still waits for them would wait in vain.
    """
    if not state.ending.through(state.committed):
        end_without_stage(state, why, cause)
    elif not state.ending.stranded:
        state.ending.stranded = why
        wanted = state.regrouping.wanted or state.barriers.waiting(state.regrouping.in_force)
        state.regrouping.stop()
        if wanted:
            end_if_stranded(state)


def end_if_stranded(state: JobState) -> None:
    """Ends the job where somebody waits for others who can't go on, and would need nobody but for that."""
    if state.ending.stranded:
        end(state, state.ending.stranded)


def see_cut_off(state: JobState) -> None:
    """Ends the job where those left have been too few for too long."""
    if cut_off := state.attendance.cut_off():
        give_up_going_on(state, f"{cut_off}. {state.ending.safe_point}")


def finish_if_empty(state: JobState) -> None:
    """Takes the job for over once nobody is left, unless a stage is replayed."""
    awaited = state.replay.waits_since is not None
    if not len(state.roster) and state.attendance.started and not (state.ending.failed or awaited):
        state.steps.sum_up(state.out)
        if state.ending.undone:
            end(state, state.ending.undone)
            return
        through = [one.member.worker for one in state.joining if one.phase in (Phase.CAUGHT_UP, Phase.ANNOUNCED)]
        send_away(state, OVER)
        state.ending.finish(state.committed, state.attendance.crash_after(state.committed), state.out)
        state.vacancies.close(state.out, through)


def send_away(state: JobState, why: str) -> None:
    """Ends all newcomers that are no members: there is nothing left that they could take part in, or another state."""
    for newcomer in state.joining:
        if newcomer.member.worker not in state.roster.workers:
            state.joining.forget(newcomer.member.worker)
            _tell_away(state, newcomer, why)


def _tell_away(state: JobState, newcomer: NewcomerRecord, why: str) -> None:
    """Ends a newcomer that nobody counts on any more, without an error."""
    state.tell(newcomer.member.worker, End(0, f"{why}, and this worker was coming back", failed=False))
