"""Workers whose states differ: replicas of a stage after each step, and a newcomer before it takes part.

A worker that differs from a majority is given up as if it had died. Its contributions from before the difference are in
every worker's state alike, and stay. Without a majority the right state is not known, and the job ends.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import ends, generations, losses, returns
from recycle_plugin.core.coordinator.facts.replica_check import Mismatch
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_workers import StateHash
from recycle_plugin.core.vocabulary.causes import Cause


def replicas(state: JobState) -> None:
    """Give up members that differ from a majority of their stage."""
    for mismatch in state.steps.mismatches(state.roster):
        _act_on(state, mismatch)


def newcomers(state: JobState) -> bool:
    """Give up newcomers, and members, that differ from their stage. Return whether a comparison was completed."""
    before = state.joining.comparisons
    for mismatch in state.joining.mismatches(state.roster):
        _act_on(state, mismatch)
    return state.joining.comparisons < before


def state_hash(state: JobState, message: StateHash) -> None:
    """Record the state hash that a worker was asked for."""
    if (member := state.speaker(message.worker)) is not None:
        state.joining.add_hash(message, member)
        if newcomers(state):
            generations.plan_change(state)


def _act_on(state: JobState, mismatch: Mismatch) -> None:
    if not mismatch.majority:
        ends.end(state, f"{mismatch}. {state.ending.safe_point}")
        return
    for worker in mismatch.workers:
        if state.joining.get(worker) is not None:
            returns.turn_down(state, worker, str(mismatch))
        else:
            losses.give_up(state, worker, Cause.DIFFERS, str(mismatch))
