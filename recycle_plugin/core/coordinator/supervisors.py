"""The supervisors of a job's workers: one comes, or asks for a seat."""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts.output import SupervisorOf, Whom
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import Pace
from recycle_plugin.core.vocabulary.deadlines import SUPERVISOR_BEAT_S, paced_s


def come(state: JobState, rank: int) -> None:
    """Handle that the supervisor of ``rank`` is there, perhaps again."""
    pace(state, SupervisorOf(rank))
    state.vacancies.supervised(rank, state.now, state.out)
    state.recovery_times.supervised(rank, state.now)
    state.log_places.supervised(rank, state.out)


def pace(state: JobState, whom: Whom) -> None:
    """Have supervisors send heartbeats less often in a large job."""
    if (job := state.job) is not None:
        every_s = paced_s(SUPERVISOR_BEAT_S, state.ranks, job.deadlines)
        if every_s > SUPERVISOR_BEAT_S:
            state.tell(whom, Pace(every_s))


def join(state: JobState, number: int, host: str, waits: bool) -> None:
    """Handle that a supervisor on ``host``, the ``number``-th to do so, asks for a lost worker's seat. With ``waits``
    it takes the next one that is lost.
    """
    state.vacancies.join(number, host, waits, state.attendance.unreachable, state.is_ending, state.now, state.out)
