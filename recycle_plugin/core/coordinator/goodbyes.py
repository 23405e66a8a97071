"""Goodbyes in a job that logs: a worker whose script is through leaves only when nobody needs it.

* While an empty stage is replayed, such a worker waits and helps: the replay may need it.
* Once one may leave, all steps are committed and all barriers passed, so nobody needs the others. A stage that is lost
  whole after that is replayed from checkpoint and logs alone, and its next process runs its script to the end alone. If
  that can't be, the job ends as failed once the others are through.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import generations
from recycle_plugin.core.coordinator.facts.joining import Phase
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import MayGo
from recycle_plugin.core.messages.from_workers import Through


def through(state: JobState, message: Through) -> None:
    """Handle that a worker's script is through; let it leave if nobody needs it."""
    state.ending.held.add(message.worker)
    let_go(state)


def let_go(state: JobState) -> None:
    """Let workers leave whose scripts are through, unless a stage that may need them is replayed. From then on a
    newcomer that has replayed a stage becomes a member without a generation: nobody would report for one.
    """
    ending = state.ending
    if state.replay.waits_since is not None and not ending.finishing:
        return
    for worker in sorted(ending.held):
        if (member := state.roster.member(worker)) is not None:
            state.attendance.through.add(member.seat.stage)
            ending.finishing = True
        state.tell(worker, MayGo(state.committed))
    ending.held.clear()
    for newcomer in state.joining if ending.finishing else ():
        worker = newcomer.member.worker
        if newcomer.phase is Phase.REPLAYED and worker in state.roster.workers:
            state.joining.forget(worker)
            state.vacancies.entered(worker)
            state.attendance.failure_detector.observe(worker)
            generations.admit(state, newcomer)
