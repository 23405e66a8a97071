"""What workers post for each other (core/coordinator/facts/boards.py), and ask of each other."""

from __future__ import annotations

from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_workers import Post, ReadBoard, WantResult


def post(state: JobState, message: Post) -> None:
    """Keep a value, and send it to those who wait for it."""
    state.boards.post(message, state.attendance.is_lost, state.out)


def read(state: JobState, message: ReadBoard) -> None:
    """Answer with the values that are there."""
    state.boards.read(message, state.out)


def want_result(state: JobState, message: WantResult) -> None:
    """Pass the request for a collective's result on to the worker that has it."""
    for holder in state.roster.of_ranks([message.holder]):
        state.tell(holder.worker, message)
