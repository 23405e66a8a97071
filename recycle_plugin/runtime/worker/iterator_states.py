"""The states of a script's data, if it has ``state_dict()`` and ``load_state_dict()`` like torchdata's
StatefulDataLoader.

A checkpoint has each iterator's state beside its place. Batches are drawn when a step begins and checkpoints are made
between steps, so the state is that before the first unused batch.

A worker that comes back begins with the state its predecessor began with, and reads up to its replica's place from
there, as the replica's other end has done. A later state would not do: a shuffling dataset's buffer is in no state, and
the two ends would go on with different batches.
"""

from __future__ import annotations

from typing import Any, Protocol

from recycle_plugin.core.messages.activity import ELSEWHERE
from recycle_plugin.core.messages.from_workers import ALWAYS
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.state.packing import packed, unpacked

BOARD = "the beginning of the data"
MOST = 1 << 20  # bytes of a state kept for newcomers


class Stateful(Protocol):
    """An object that knows the position of a script's data, and can be set to it."""

    def state_dict(self) -> Any:
        """Return the state before the next batch: tensors and plain values."""

    def load_state_dict(self, state: Any, /) -> object:
        """Go on from ``state``."""


def is_stateful(data: object) -> bool:
    """Whether ``data`` has both methods."""
    return all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))


class IteratorStates:
    """The states of one worker's data. ``present``: has them, or is None if the script's data has no states."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.present: Stateful | None = None
        self._begun: tuple[Place, bytes] | None = None  # a place, and the state there
        self._said = False

    def begin(self, read: int, state: bytes | None) -> None:
        """Keep for newcomers of this rank where the script's first iterator begins: after ``read``, with ``state``."""
        if state is not None and len(state) <= MOST:
            self._session.boards.post(BOARD, packed((read, state)), ALWAYS)

    def begin_as_predecessor(self) -> None:
        """Have a newcomer's first iterator begin where its predecessor's did, once it is brought to a place. A loader
        that has that state already does not load it: without helper processes torchdata's would give later epochs in
        another order than a loader that never loaded one, such as that of the replica's other end.
        """
        kept = None if self.present is None else self._session.boards.predecessors(BOARD)
        if kept is not None:
            read, state = unpacked(kept)
            if read or self.state() != state:
                self.set(read, state)

    def state(self) -> bytes | None:
        """Return the present state. Return None if there is none that can be read back, and report that once."""
        if self.present is None:
            return None
        with self._session.heartbeats.at(ELSEWHERE, "the state of the data iterator"):
            try:
                text = packed(self.present.state_dict())
                unpacked(text)
            except Exception as error:  # a script's objects may raise anything
                self._say_unreadable(error)
                return None
        return text

    def set(self, read: int, state: bytes) -> None:
        """Have the first iterator start after ``read`` batches with ``state``, once it is moved that far."""
        self._begun = Place(1, read), state

    def nearest(self, place: Place, read: int) -> int:
        """Set the iterator, which has given ``read`` batches, to a known state on the way to ``place``. Returns how
        many batches it has given then. Raises RecycleError if the script's data does not take the state.
        """
        begun, self._begun = self._begun, None
        if begun is None or self.present is None or begun[0].iterator != place.iterator:
            return read
        (_, known), state = begun
        if not read <= known <= place.read:
            return read
        with self._session.heartbeats.at(ELSEWHERE, "the state of the data iterator"):
            try:
                self.present.load_state_dict(unpacked(state))
            except Exception as error:  # a script's objects may raise anything
                raise RecycleError(
                    f"load_state_dict() of the data iterator, with the state after its batch {known}: "
                    f"{_why(error)}; give it the data, and as many helper processes, that it had when the state was "
                    "saved, or set recycle.resume_iterators to false"
                ) from error
        return known

    def _say_unreadable(self, error: Exception) -> None:
        if not self._said:
            self._said = True
            self._session.note(
                "data",
                f"state_dict() of the data iterator can't be kept ({_why(error)}): tensors, numbers, "
                "strings, lists and dicts can; after a checkpoint, and in a worker that comes back, the iterator is "
                "read up to its place",
            )


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
