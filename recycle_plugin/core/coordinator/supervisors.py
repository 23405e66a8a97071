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
    """Tell supervisors the pace of their heartbeats, slower in a large job, and how long to bear silence."""
    if (job := state.job) is not None:
        every_s = paced_s(SUPERVISOR_BEAT_S, state.ranks, job.deadlines)
        state.tell(whom, Pace(every_s, job.deadlines.cut_off_s))


def join(state: JobState, number: int, host: str, waits: bool) -> None:
    """Handle the ``number``-th request for a lost worker's seat, from ``host``. ``waits``: also for a later vacancy."""
    state.vacancies.join(number, host, waits, state.attendance.unreachable, state.is_ending, state.now, state.out)
