"""Contributions to a step: the replicas that contribute after a loss, and the end of a job's data.
core/vocabulary/step_batches.py decides whether a lost replica's gradients count. core/coordinator/facts/places.py knows
the places of plain iterators.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import generations, losses
from recycle_plugin.core.coordinator.facts.regrouping import Reports
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_workers import OutOfData
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.packed_data import PackedData
from recycle_plugin.core.vocabulary.step_batches import StepBatches


def batches_behind(state: JobState, committed: int, reports: Reports) -> StepBatches:
    """Decide which replicas contribute after ``committed``, begun steps included (core/vocabulary/step_batches.py)."""
    if not state.shrinks:
        return state.batches
    assert state.job is not None, "a job that trains has begun"
    held = {Seat.parse(seat): PackedData(packed) for seat, packed in reports.holdings.items()}
    whole = state.job.policy.replicas(state.attendance.view(reports.generation.roster))
    heard = all(
        report.adopted >= state.regrouping.in_force
        for worker, report in reports.by_worker.items()
        if worker in state.roster.workers
    )
    return state.batches.changed(whole, committed, held, state.job.stages, heard)


def say_batches(state: JobState) -> None:
    """Report which replicas contribute to the steps to come and to begun ones."""
    batches, first = state.batches, state.committed + 1
    kept = sorted(map(int, batches.of_steps))
    step = kept[-1] + 1 if kept else first
    share = batches.share(step)
    text = f"from step {step} on {share} contribute"
    if not share.whole:
        text += (
            f": sums are divided by the number of their micro-batches, and each step is applied "
            f"with {share.rate_factor:.3g} of its learning rate"
        )
    if kept:
        text += f"; all sums of step {' and '.join(map(str, kept))} still include the lost replicas"
    elif batches.void:
        text += f"; no sum of step {batches.void} includes the lost replicas"
    state.say(
        "contributing",
        text,
        step=step,
        contributed=list(batches.replicas),
        replicas=batches.total,
        rate_factor=round(share.rate_factor, 6),
        kept=kept,
        void=batches.void,
    )


def leave_out(state: JobState, step: int) -> None:
    """Leave out a step that can't be filled, since all iterators have ended."""
    state.steps.leave_out(step)
    state.say(
        "data",
        f"all iterators have ended, and step {step} can't be filled: the batches left for it are dropped, and "
        "every script gets a StopIteration",
        step=step,
        unfilled=True,
    )


def out_of_data(state: JobState, message: OutOfData) -> None:
    """Handle that a worker has nothing to draw for a step: all regroup, and others give more or the data has ended. A
    worker that repeats this more often between two commits than all others together could need is given up.
    """
    member = state.roster.member(message.worker)
    if member is None or not state.holds(message.generation) or state.ending.failed:
        return
    times = state.lacked[member.worker] = state.lacked.get(member.worker, 0) + 1
    if times > len(state.attendance.seats) + 1:
        why = f"it has no data for step {message.step}, {times} times, whatever others give"
        losses.give_up(state, member.worker, Cause.CONFUSED, why)
    else:
        generations.regroup(state, f"{member.seat} has no data for step {message.step}")
