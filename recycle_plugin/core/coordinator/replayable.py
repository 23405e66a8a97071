"""What stages can be replayed from: durable checkpoints, and logs until they break off or are removed."""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts.output import WORKERS
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_workers import Durable, LogBroken, Logged, LogsServed
from recycle_plugin.core.vocabulary.commit_rule import unstarted


def durable(state: JobState, message: Durable) -> None:
    """Record that a checkpoint is durable, and tell all, who drop what led to it. While stages are replayed this waits:
    they all begin at one checkpoint, and need the logs from there on. A step that is not committed, perhaps because an
    earlier checkpoint was loaded since, is not one of this job.
    """
    if not 0 <= message.step <= state.committed:
        return
    if state.replay.waits_since is not None:
        state.replay.held_back = message
        return
    before = state.logs.told
    if state.logs.durable(message):
        state.recovery_times.written(message.write_s)
        state.log_places.durable(message.step)
        state.tell(WORKERS, message)
        if state.logs.told != before:
            state.tell(WORKERS, state.logs.told)


def removed(state: JobState, path: str) -> None:
    """Record that the checkpoint at ``path`` was removed."""
    last = path == state.ending.checkpoint
    state.ending.unusable(path)
    state.logs.removed(path)
    if last:
        more = "; no stage can be replayed before the next one" * state.logs.kept
        state.say("warning", f"the checkpoint {path} was removed{more}. {state.ending.safe_point}")


def logged(state: JobState, message: Logged) -> None:
    """Record how far a worker's log is on its disk."""
    if message.step < unstarted(state.committed):
        state.logs.heard(message)


def log_broken(state: JobState, message: LogBroken) -> None:
    """Record that a worker logs nothing more for now."""
    member = state.speaker(message.worker)
    if not 0 < message.step < unstarted(state.committed):
        return  # no such step
    if member is not None:
        state.logs.broken(message, member.seat.stage)
    state.say(
        "log_broken",
        f"{state.attendance.named(message.rank)} logs nothing from step {message.step} on: {message.why}; "
        "until the next checkpoint is durable no stage can be replayed over that step",
        rank=message.rank,
        step=message.step,
        why=message.why,
    )


def served(state: JobState, message: LogsServed) -> None:
    """Record where a supervisor serves logs."""
    state.log_places.served(message)
