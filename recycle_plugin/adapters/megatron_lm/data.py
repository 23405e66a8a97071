"""Megatron-LM's training data by index: a micro-batch has the same samples on any worker."""

from __future__ import annotations

from typing import Any

from recycle_plugin.adapters.megatron_lm.model import Batches
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.errors import RecycleError


class IndexedData:
    """A job's micro-batches, ``size`` samples each, in the order of Megatron's sampler "single". ``consumed``: the
    samples trained before this job began, which is after step ``begun``.
    """

    def __init__(
        self, batches: Batches, cursor: DataCursor, replicas: int, size: int, consumed: int, begun: int
    ) -> None:
        self._batches, self._cursor, self._replicas, self._size = batches, cursor, replicas, size
        self._consumed, self._begun = consumed, begun
        self._loader: Any = None

    def take(self, data_iterator: Any) -> None:
        """Use the dataset behind the iterator that Megatron trains from; None if this stage reads no data."""
        self._loader = getattr(data_iterator, "iterable", data_iterator)  # it may be a RerunDataIterator
        if self._loader is not None and not hasattr(self._loader, "_dataset"):
            raise RecycleError(
                f"training data comes from a {type(self._loader).__name__}: peers compute a lost worker's "
                "micro-batches, and need a dataset that is read by index; write --dataloader-type single"
            )

    def __call__(self, step: int, micro_batch: MicroBatch) -> tuple[Any, Any]:
        """Return inputs and labels of a micro-batch, which are the same object for Megatron."""
        position = self._cursor.before(step) - self._cursor.before(self._begun + 1) + micro_batch.index
        first = self._consumed + (position * self._replicas + micro_batch.replica) * self._size
        loader = self._loader
        batch = loader._collate_fn([loader._dataset[first + each] for each in range(self._size)])
        values = self._batches.packed(batch)
        return values, values
