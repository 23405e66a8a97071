"""What workers post for each other (core/coordinator/facts/boards.py), ask of each other, and share in a store."""

from __future__ import annotations

from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_workers import Post, ReadBoard, StoreCall, WantResult
from recycle_plugin.core.vocabulary.roster import WorkerId


def post(state: JobState, message: Post) -> None:
    """Keep a value, and send it to those who wait for it."""
    state.boards.post(message, state.attendance.is_lost, state.out)


def read(state: JobState, message: ReadBoard) -> None:
    """Answer with the values that are there."""
    state.boards.read(message, state.out)


def store_call(state: JobState, message: StoreCall) -> None:
    """Handle a call of the script's store."""

    def tell(worker: WorkerId, answer: object) -> None:
        if not state.attendance.is_lost(worker):
            state.tell(worker, answer)

    state.key_values.call(message, tell)


def want_result(state: JobState, message: WantResult) -> None:
    """Pass the request for a collective's result on to the worker that has it."""
    for holder in state.roster.of_ranks([message.holder]):
        state.tell(holder.worker, message)
