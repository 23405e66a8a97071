"""The goodbyes of workers whose scripts are through, in a job that logs: each goes once nobody needs it.

* While a stage that has nobody is replayed, who wants to go waits and helps: the replay may need it.
* Once somebody may go, all steps are committed and all barriers passed, so that nobody needs the others.  A stage that
  is lost whole then is replayed from checkpoint and logs alone, and its next process runs its script to the end without
  them; where that can't be, the job ends as failed, once the others are through.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import generations
from recycle_plugin.core.coordinator.facts.joining import Phase
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import MayGo
from recycle_plugin.core.messages.from_workers import Through


def through(state: JobState, message: Through) -> None:
    """Takes in that a worker's script is through, and lets it go where nobody needs it."""
    state.ending.held.add(message.worker)
    let_go(state)


def let_go(state: JobState) -> None:
    """Lets those go whose scripts are through, unless a stage is replayed that may need them.  From then on who has
    replayed a stage is a member without a generation: nobody would report for one.
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
