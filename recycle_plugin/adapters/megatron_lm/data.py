"""Megatron-LM's training data by index: a micro-batch has the same samples on any worker."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from recycle_plugin.adapters.megatron_lm.model import Batches
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.errors import RecycleError


class IndexedData:
    """A job's micro-batches in the order of Megatron's sampler "single". The loader says which sample is first.
    ``args``: Megatron's, before the first step.
    """

    def __init__(self, batches: Batches, cursor: DataCursor, args: Namespace) -> None:
        self._batches, self._cursor, self._args = batches, cursor, args
        self._begun: int = args.iteration
        self._loader: Any = None

    def take(self, data_iterator: Any) -> None:
        """Use the dataset behind the iterator that Megatron trains from; None if this stage reads no data. Raises
        RecycleError if the dataset can't be read by index, or ends before the job's last step.
        """
        if self._loader is not None or data_iterator is None:
            return
        loader = getattr(data_iterator, "iterable", data_iterator)  # it may be a RerunDataIterator
        sampler = getattr(loader, "_index_sampler", None)
        if not hasattr(loader, "_dataset") or type(sampler).__name__ != "MegatronPretrainingSampler":
            raise RecycleError(
                f"training data comes from a {type(loader).__name__} with a {type(sampler).__name__}: peers compute a "
                "lost worker's micro-batches, and need a dataset that is read by index in the order of "
                "MegatronPretrainingSampler; write --dataloader-type single"
            )
        self._check_length(sampler)
        self._loader = loader

    def _check_length(self, sampler: Any) -> None:
        args, left = self._args, sampler.total_samples - sampler.consumed_samples
        steps = args.train_iters - self._begun
        wanted = args.train_samples - sampler.consumed_samples if args.train_samples else steps * args.global_batch_size
        if wanted > left:
            raise RecycleError(
                f"steps {self._begun + 1} to {args.train_iters} need {wanted} samples, and the training data have "
                f"{left} of {sampler.total_samples} left: write a smaller --train-iters, or the --global-batch-size of "
                "the steps before"
            )

    def __call__(self, step: int, micro_batch: MicroBatch) -> tuple[Any, Any]:
        """Return inputs and labels of a micro-batch, which are the same object for Megatron."""
        loader, size = self._loader, self._args.micro_batch_size
        position = self._cursor.before(step) - self._cursor.before(self._begun + 1) + micro_batch.index
        place = position * self._args.data_parallel_size + micro_batch.replica
        first = loader._index_sampler.consumed_samples + place * size
        batch = loader._collate_fn([loader._dataset[first + each] for each in range(size)])
        values = self._batches.packed(batch, training=True)
        return values, values
