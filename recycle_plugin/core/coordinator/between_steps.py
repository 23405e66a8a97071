"""Barriers between steps, and what all do at them: pass, load a checkpoint, or take another batch size."""

from __future__ import annotations

from typing import Any

from recycle_plugin.core.coordinator import ends, generations
from recycle_plugin.core.coordinator.facts.output import WORKERS
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import BarrierPassed
from recycle_plugin.core.messages.from_workers import BarrierReached, Resized
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.commit_rule import unstarted


def arrive(state: JobState, message: BarrierReached) -> None:
    """Record that a worker has arrived at a barrier, and tell all once all are there."""
    values = _arrive(state, message, message.barrier, message.values)
    if values is not None and message.barrier.meets is Meets.LOADED:
        generations.regroup(state, "a checkpoint was loaded")
    elif values is not None:
        _passed(state, message.barrier, values)
        state.tell(WORKERS, BarrierPassed(message.barrier, values, unstarted(state.committed)))


def resize(state: JobState, message: Resized) -> None:
    """Record that a worker has planned for another batch size. Once all have, all regroup. The size counts from the
    first such message, even if a worker dies now, because all have passed a barrier before. A repeated message, of that
    generation or an older one, changes nothing.
    """
    if state.logs.passed and message.generation > state.resized_in:
        state.resized_in = message.generation
        if state.attendance.resize(message.micro_batches):
            _take_size(state, message)
    if _arrive(state, message, Barrier(Meets.RESIZED), {}) is not None:
        generations.regroup(state, "another batch size")


def _take_size(state: JobState, message: Resized) -> None:
    step = state.committed + 1
    state.throughput.resize(message.full_us)
    state.logs.resized(step)
    state.say(
        "batch",
        f"from step {step} on {message.batch} samples a step, {message.micro_batches} "
        f"micro-batch{'es' * (message.micro_batches > 1)} of each replica",
        step=step,
        batch=message.batch,
        micro_batches=message.micro_batches,
    )


def _arrive(
    state: JobState, message: BarrierReached | Resized, barrier: Barrier, values: dict[str, Any]
) -> dict[str, Any] | None:
    """Record an arrival at ``barrier``. Return what all have brought if all are there now, else None."""
    ends.end_if_stranded(state)
    if message.generation != state.regrouping.in_force or state.regrouping.at_once is not None:
        return None
    members, enough = state.roster.workers, not state.attendance.outnumbered
    return state.barriers.arrive(message.worker, message.generation, barrier, values, members, enough)


def _passed(state: JobState, barrier: Barrier, values: dict[str, Any]) -> None:
    """Record that all have passed ``barrier``, with ``values``."""
    state.logs.passed.append(barrier)
    if barrier.meets is Meets.EVALUATED:
        state.steps.recorded.evaluated(barrier.number, values)
    if barrier.meets is Meets.DATA_ENDED:
        state.steps.recorded.unfilled(barrier.number)
    if barrier.meets in (Meets.EVALUATED, Meets.DATA_ENDED):
        state.joining.tell(state.steps.recorded, state.committed, state.places.known(), state.out)
