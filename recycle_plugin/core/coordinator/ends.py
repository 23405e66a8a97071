"""The ways in which a job ends: after a step that all reach, at once, or when all have left.
core/coordinator/facts/ending.py keeps how it ends. Newcomers are sent away here too: nothing is left for them to take
part in, or only another state.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts.joining import Phase
from recycle_plugin.core.coordinator.facts.vacancies import OVER
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, End


def end_planned(state: JobState, reason: str, code: int = 0, cause: str = "") -> None:
    """End the job after a step that all reach, or at once before the start. ``cause``: what has led to that. If guards
    were killed, the end is attributed to that, with exit code TRY_AGAIN: scripts do not know of it, and there is to be
    a checkpoint.
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
    """End the job at once: nobody can go on. ``killed``: rank of a worker killed before there was a run folder."""
    state.regrouping.stop()
    state.ending.fail(reason, state.out, cause, killed)
    state.vacancies.close(state.out)


def empty_stage(state: JobState) -> str:
    """Return why those left can't go on if a stage is empty, else ""."""
    empty = state.attendance.empty_stages()
    undone = f", so its script's work after step {state.committed}, the last one, is not done"
    what = undone * state.ending.finishing
    return f"stage {empty[0]} has no live worker left{what}. {state.ending.safe_point}" if empty else ""


def crash(state: JobState) -> str:
    """Return the errors with which scripts of the first empty stage ended, in words; "" if none."""
    empty = state.attendance.empty_stages()
    return state.attendance.crash_in(empty[0]) if empty else ""


def end_without_stage(state: JobState, why: str, cause: str = "") -> None:
    """End the job as failed for an empty stage: at once, or if a script is through already, once all are."""
    if not state.ending.finishing:
        end(state, why, cause)
        return
    state.replay.waits_since = None
    state.ending.undone = state.ending.undone or why
    finish_if_empty(state)


def give_up_going_on(state: JobState, why: str, cause: str = "") -> None:
    """End the job as failed, unless all steps up to a planned end are committed. In that case workers that do nothing
    together any more just leave. But if some still wait for others, they would wait in vain, and the job fails.
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
    """End the job if a worker waits for others that can't go on."""
    if state.ending.stranded:
        end(state, state.ending.stranded)


def see_cut_off(state: JobState) -> None:
    """End the job if too few have been left for too long."""
    if cut_off := state.attendance.cut_off():
        give_up_going_on(state, f"{cut_off}. {state.ending.safe_point}")


def finish_if_empty(state: JobState) -> None:
    """End the job once nobody is left, unless a stage is replayed."""
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
    """End all newcomers that are no members: nothing is left for them to take part in, or only another state."""
    for newcomer in state.joining:
        if newcomer.member.worker not in state.roster.workers:
            state.joining.forget(newcomer.member.worker)
            text = f"{why}, and this worker was coming back"
            state.tell(newcomer.member.worker, End(0, text, failed=False))  # nobody counts on it
