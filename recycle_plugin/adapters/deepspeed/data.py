"""Training data addressed by (step, replica, micro-batch), so that a peer can load what a lost worker would have."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable

from torch.utils.data import BatchSampler, Dataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from recycle_plugin.core.ids import MicroBatch
from recycle_plugin.core.places import Places
from recycle_plugin.runtime.errors import RecycleError

Source = Callable[[int, MicroBatch], Any]
"""Of (step, micro-batch): the batch of inputs and labels."""


class DatasetSource:
    """A map-style dataset in the order in which DeepSpeed's own loader would read it.

    DeepSpeed gives replica r every DP-th sample, unshuffled, and starts again at the end.  Steps count from 1.
    """

    def __init__(self, dataset: Dataset, replicas: int, places: Places, micro_batch_size: int, drop_last: bool, collate: Callable | None) -> None:
        self._dataset = dataset
        self._replicas, self._places = replicas, places
        self._size = micro_batch_size
        self._drop_last = drop_last
        self._collate = collate or default_collate
        self._batches = lru_cache(maxsize=None)(self._batches_of)

    def __call__(self, step: int, micro_batch: MicroBatch) -> Any:
        batches = self._batches(micro_batch.replica)
        position = self._places.before(step) + micro_batch.index
        return self._collate([self._dataset[index] for index in batches[position % len(batches)]])

    def _batches_of(self, replica: int) -> list[list[int]]:
        sampler = DistributedSampler(self._dataset, num_replicas=self._replicas, rank=replica, shuffle=False)
        batches = list(BatchSampler(sampler, self._size, self._drop_last))
        if not batches:
            raise RecycleError(f"training_data has {len(self._dataset)} samples: too few for one micro-batch of {self._size} per replica")
        return batches
