"""Training data: a script's iterator, or a dataset addressed so that peers can load a lost worker's micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch.utils.data import Dataset, default_collate

from recycle_plugin.core.messages.activity import ELSEWHERE
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.iterator_draws import Draw, Ended, Place
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.port import Tensors
from recycle_plugin.runtime.movers.batches import described, packed
from recycle_plugin.runtime.worker.iterator_states import IteratorStates


class DatasetSource:
    """A map-style dataset, read in the order of DeepSpeed's own loader: replica r gets every DP-th sample, unshuffled,
    and starts again at the end. Steps count from 1. Indices are computed, not listed as torch's samplers do: the list
    of a lost replica would be made while all wait.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        replicas: int,
        cursor: DataCursor,
        micro_batch_size: int,
        drop_last: bool,
        collate: Callable[..., Any] | None,
    ) -> None:
        self._dataset: Any = dataset
        self._replicas, self._cursor = replicas, cursor
        self._size = micro_batch_size
        self._drop_last = drop_last
        self._collate = collate or default_collate

    def __call__(self, step: int, micro_batch: MicroBatch) -> Any:
        samples, own, batches = self._counts
        first = (self._cursor.before(step) + micro_batch.index) % batches * self._size
        numbers = range(first, min(first + self._size, own))
        # the first samples fill up what replicas lack to have equally many
        indices = [(number * self._replicas + micro_batch.replica) % samples for number in numbers]
        return self._collate([self._dataset[index] for index in indices])

    @cached_property
    def _counts(self) -> tuple[int, int, int]:
        """The numbers of samples, of a replica's samples, and of its micro-batches."""
        samples = len(self._dataset)
        own = -(-samples // self._replicas)
        batches = own // self._size if self._drop_last else -(-own // self._size)
        if not batches:
            raise RecycleError(
                f"training_data has {samples} samples: too few for one micro-batch of {self._size} per replica"
            )
        return samples, own, batches


class ScriptsIterator:
    """Reads a script's iterator (core.worker.iterator_data.DataIterator); batches are kept packed for the transport.
    ``next_batch(what)`` returns a batch; ``what`` names it in errors. ``states``: the states of iterators that have
    any.
    """

    def __init__(self, session: Session, next_batch: Callable[[str], Any], states: IteratorStates) -> None:
        self._session, self._next_batch, self._states = session, next_batch, states

    def read(self, step: int, position: int, draw: Draw | None) -> Tensors | None:
        """Read the next batch, packed with its ``draw``; skip it if ``draw`` is None. Raises Ended."""
        batch = self._read(f"in step {step}, at its micro-batch {position}")
        return None if draw is None else packed(batch, draw)

    def skip_to(self, place: Place, read: int) -> None:
        """Move the iterator to ``place``, if possible from a known state. Raises RecycleError if it ends before."""
        for number in range(self._states.nearest(place, read) + 1, place.read + 1):
            try:
                self._read(f"at batch {number} of the {place.read} that its replica has had before")
            except Ended as ended:
                raise RecycleError(str(ended)) from None

    def _read(self, what: str) -> Any:
        heartbeats, thread = self._session.heartbeats, self._session.thread
        was_at, work = heartbeats.turn_to((ELSEWHERE, "the data iterator")), thread.turn_to(f"the data {what}")
        try:
            return self._next_batch(what)
        finally:
            thread.work = work
            heartbeats.turn_to(was_at)

    def draw_of(self, batch: Tensors) -> Draw:
        """Return the draw of a packed batch."""
        return Draw(*described(batch))
