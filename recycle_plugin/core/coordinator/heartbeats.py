"""Heartbeats of workers and of their supervisors; a worker's is answered with a lease."""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.coordinator import departures
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import Lease
from recycle_plugin.core.messages.from_workers import Heartbeat, SupervisorHeartbeat
from recycle_plugin.core.vocabulary.commit_rule import unstarted


def of_member(state: JobState, message: Heartbeat) -> None:
    """Handle a worker's heartbeat, and answer it."""
    message = where_it_can_be(state, message)
    state.tell(message.worker, state.attendance.failure_detector.heartbeat(message))
    if not state.ending.some_through or state.pushed:
        return
    if (member := state.roster.member(message.worker)) is not None:
        departures.compare_scripts(state, member, message.step)


def where_it_can_be(state: JobState, message: Heartbeat) -> Heartbeat:
    """Return the heartbeat with step 0 if nobody can have begun its step: it would pass for the script's step later."""
    return message if message.step < unstarted(state.committed) else replace(message, step=0)


def of_supervisor(state: JobState, message: SupervisorHeartbeat) -> None:
    """Record that a member's process is there."""
    state.attendance.failure_detector.supervisor_heartbeat(message)


def of_newcomer(state: JobState, message: Heartbeat) -> None:
    """Record a newcomer's activity. It gets no lease."""
    _watch(state, message)
    state.tell(message.worker, Lease(message.number, 0.0))


def of_newcomers_supervisor(state: JobState, message: SupervisorHeartbeat) -> None:
    """Record that a newcomer's process is there."""
    _watch(state, message)
    state.vacancies.heard(message.worker, state.now)


def _watch(state: JobState, message: Heartbeat | SupervisorHeartbeat) -> None:
    """Record what a newcomer is at. Nothing is kept of other processes that are no members."""
    if state.vacancies.is_newcomer(message.worker):
        state.attendance.failure_detector.newcomer_heartbeat(message)
