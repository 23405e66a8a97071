"""A map-style dataset is read in the order of torch's own samplers, without their lists."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, Dataset
from torch.utils.data.distributed import DistributedSampler

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.worker.data import DatasetSource

MICRO_BATCHES = 3  # of a step


class Numbers(Dataset[int]):
    """A dataset whose samples are their indices."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._samples:
            raise IndexError(index)
        return index


def source(samples: int, replicas: int, size: int, drop_last: bool) -> DatasetSource:
    return DatasetSource(Numbers(samples), replicas, DataCursor(MICRO_BATCHES), size, drop_last, collate=list)


def stock(samples: int, replicas: int, replica: int, size: int, drop_last: bool) -> list[Any]:
    """A replica's micro-batches of an epoch, as DeepSpeed's loader draws them."""
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(samples), replicas, replica, shuffle=False)
    return list(BatchSampler(sampler, size, drop_last))


@pytest.mark.parametrize("drop_last", (True, False))
@pytest.mark.parametrize("size", (1, 2, 3, 5))
@pytest.mark.parametrize("replicas", (1, 2, 3, 7))
@pytest.mark.parametrize("samples", (0, 1, 2, 5, 24, 31))
def test_all_replicas_read_what_torchs_samplers_give_over_two_epochs(samples, replicas, size, drop_last):
    read = source(samples, replicas, size, drop_last)
    for replica in range(replicas):
        epoch = stock(samples, replicas, replica, size, drop_last)
        if not epoch:
            with pytest.raises(RecycleError, match=f"has {samples} samples: too few for one micro-batch of {size} "):
                read(1, MicroBatch(replica, 0))
            continue
        for position in range(2 * len(epoch) + 1):
            step, index = divmod(position, MICRO_BATCHES)
            assert read(1 + step, MicroBatch(replica, index)) == epoch[position % len(epoch)]


def test_a_replicas_first_micro_batch_costs_no_more_in_a_large_dataset():
    """A lost replica's first one is read while all wait: a list of all samples would be 8 TB."""
    read = source(2 * 10**12, 2, 4, drop_last=True)
    assert read(10**9, MicroBatch(1, 2)) == [
        2 * (4 * (MICRO_BATCHES * (10**9 - 1) + 2) + sample) + 1 for sample in range(4)
    ]
