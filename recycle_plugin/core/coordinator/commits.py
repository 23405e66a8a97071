"""Steps that workers apply. A step is committed once every live worker has applied it. Nothing is committed while the
membership changes at once, or while too few are left. A step with a gradient norm over the limit is rejected: all hear
so in a generation that holds at once, and take the step back.
"""

from __future__ import annotations

from math import isfinite

from recycle_plugin.core.coordinator import comparisons, ends, generations
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_workers import Contribution, Fingerprint, Stepped
from recycle_plugin.core.vocabulary.commit_rule import unstarted


def stepped(state: JobState, message: Stepped) -> None:
    """Record that a worker has applied a step, and commit the steps that all have applied."""
    if message.time is not None:
        state.steps.add_compute_time(message.worker, message.step, message.time)
    roster, committed = state.roster, state.committed
    member = roster.member(message.worker)
    if member is None or state.halted or state.ending.failed:
        return
    if message.place is not None and message.step > committed:
        state.places.stepped(message, member.seat.replica)
    for step in state.steps.apply(message, roster):
        commit(state, step)
    comparisons.replicas(state)
    if state.steps.slowness.compared:
        _rebalance(state)


def commit(state: JobState, step: int) -> None:
    """Commit ``step``: its changes are final."""
    state.attendance.failure_detector.committed(step, state.now)
    state.steps.commit(step, state.roster, state.now, state.out, state.batches)
    state.batches = state.batches.committed(step)
    state.lacked.clear()
    state.logs.passed.clear()
    state.vacancies.committed(step)
    state.places.commit(step)
    state.joining.tell(state.steps.recorded, step, state.places.known(), state.out)


def _rebalance(state: JobState) -> None:
    """Plan anew, for a step that nobody has started, if a worker has become slow or is slow no longer."""
    if state.halted or state.regrouping.under_way or state.ending.ended is not None:
        return
    cause = state.steps.rebalance(state.roster, state.now, state.out)
    if cause is not None:
        generations.regroup(state, cause, from_step=unstarted(state.committed))


def contribute(state: JobState, message: Contribution) -> None:
    """Handle a worker's contribution to a decision on a step."""
    norm = state.steps.contribute(message, state.out)
    if norm is not None:
        _reject(state, message.step, norm)


def _reject(state: JobState, step: int, norm: float) -> None:
    """Have all take ``step`` back for its gradient norm, or end the job if nothing can be done with such gradients."""
    validation, safe_point = state.steps.validation, state.ending.safe_point
    if validation.hopeless(norm):
        ends.end(
            state,
            f"the gradient norm of step {step} is {norm}. {safe_point}; to skip such steps set recycle.nonfinite "
            'to "skip"',
        )
        return
    state.say(
        "rejected",
        f"step {step} is taken back and {'clipped' if isfinite(norm) else 'skipped'}: its gradient norm is "
        f"{norm:.4g} "
        f"({validation.rejected} of {validation.judged} steps so far)",
        step=step,
        norm=norm,
        rejected=validation.rejected,
        judged=validation.judged,
    )
    if not state.halted:
        generations.regroup(state, f"rejection of step {step}", keeps_plan=True)


def fingerprint(state: JobState, message: Fingerprint) -> None:
    """Record the hash of a worker's state after a step."""
    state.steps.add_fingerprint(message)
