"""What workers say for the user, and errors with which their scripts end."""

from __future__ import annotations

from recycle_plugin.core.coordinator import ends
from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_workers import Crashed, Fatal, Note, StrangersAtLogs


def note(state: JobState, message: Note) -> None:
    """Passes a worker's event on; a checkpoint that is saved is one to go on from."""
    if message.kind == "checkpoint" and isinstance(path := message.details.get("path"), str):
        state.ending.saved(path)
    if message.is_known:
        state.out.events.append(Event(message.kind, message.text, {**message.details, "rank": message.rank}))


def note_of_newcomer(state: JobState, message: Note) -> None:
    """Does the same for a newcomer, and notes how long it has taken to load a checkpoint."""
    if message.kind == "restored" and isinstance(seconds := message.details.get("seconds"), float | int):
        state.recovery_times.loaded(seconds)
    note(state, message)


def fatal(state: JobState, message: Fatal) -> None:
    """Ends the job for what a worker has found, which nobody can go on with."""
    ends.end(state, message.text)


def crashed(state: JobState, message: Crashed) -> None:
    """Takes in that a member's script has ended with an error; it is lost once its process ends."""
    state.attendance.crashed(message, state.out)


def error_of_newcomer(state: JobState, message: Fatal | Crashed) -> None:
    """Says why a newcomer does not come back, which ends nobody's training but its own."""
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
    """Says that somebody has asked for logs who has no part in the job."""
    state.say("stranger", message.text, address=message.address)
