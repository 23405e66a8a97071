"""Workers' reports for the user, and the errors with which their scripts end."""

from __future__ import annotations

from recycle_plugin.core.coordinator import ends
from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_workers import Crashed, Fatal, Note, StrangersAtLogs


def note(state: JobState, message: Note) -> None:
    """Pass a worker's event on, and record the checkpoint if it reports a saved one."""
    if message.kind == "checkpoint" and isinstance(path := message.details.get("path"), str):
        state.ending.saved(path)
    if message.is_known:
        state.out.events.append(Event(message.kind, message.text, {**message.details, "rank": message.rank}))


def note_of_newcomer(state: JobState, message: Note) -> None:
    """Pass a newcomer's event on, and record how long it took to load a checkpoint."""
    if message.kind == "restored" and isinstance(seconds := message.details.get("seconds"), float | int):
        state.recovery_times.loaded(seconds)
    note(state, message)


def fatal(state: JobState, message: Fatal) -> None:
    """End the job: a worker has found something that nobody can go on with."""
    ends.end(state, message.text)


def crashed(state: JobState, message: Crashed) -> None:
    """Record that a member's script ended with an error. The worker is lost once its process ends."""
    state.attendance.crashed(message, state.out)


def error_of_newcomer(state: JobState, message: Fatal | Crashed) -> None:
    """Report why a newcomer does not come back. This ends nobody else's training."""
    who = state.attendance.named(message.rank)
    if isinstance(message, Fatal):
        state.say("warning", f"{who} can't come back: {message.text}", rank=message.rank)
    else:
        state.say(
            "error",
            f"the script of {who}, which was to come back, ended with {message.error}",
            rank=message.rank,
            traceback=message.trace,
        )


def stranger(state: JobState, message: StrangersAtLogs) -> None:
    """Report that somebody without a part in the job has asked for logs."""
    state.say("stranger", message.text, address=message.address)
