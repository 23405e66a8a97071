"""A script's batches travel whole, and what is kept of them is nobody else's memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.movers.batches import described, packed, unpacked
from recycle_plugin.runtime.stage.ports import StageModel
from recycle_plugin.runtime.stage.stage import Stage


def test_tensors_in_tuples_and_lists_come_back_with_the_label():
    mask, ids, labels = torch.tensor([[True, False]]), torch.arange(6).reshape(2, 3), torch.rand(2)
    tensors = packed(((ids, [mask, None]), labels), [1, 4])
    assert described(tensors) == [1, 4] and all(torch.is_tensor(tensor) for tensor in tensors)
    (found_ids, (found_mask, nothing)), found_labels = unpacked(tensors)
    assert nothing is None
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype
        for a, b in ((found_ids, ids), (found_mask, mask), (found_labels, labels))
    )


def test_neither_the_iterator_nor_the_model_can_change_what_is_kept():
    ids = torch.zeros(3)
    tensors = packed((ids, None))
    ids += 1  # an iterator that uses its buffer again
    stage = Stage(StageModel(torch.nn.Identity(), None, 1, True, False, CPU), None, lambda *_: nullcontext())
    stage.load(unpacked(tensors)).data.fill_(2)  # a model that works in place
    assert unpacked(tensors)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "batch, name", [(({"text": torch.zeros(1)}, None), "dict"), ((torch.zeros(1), "label"), "str")]
)
def test_what_cannot_travel_is_named(batch, name):
    with pytest.raises(RecycleError, match=f"a batch has a {name} in it"):
        packed(batch)
