"""A script's batches travel whole, and what is kept of them is nobody else's memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from recycle_plugin.core.vocabulary.ids import MicroBatch
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
    filled = Filled()
    stage = Stage(StageModel(filled, None, 1, True, False, CPU), None, lambda *_: nullcontext())
    loaded = stage.load(unpacked(tensors), shared=True)
    for _ in range(2):
        stage.forward((1, MicroBatch(0, 0)), loaded, ())
    assert filled.given == [[0, 0, 0]] * 3 and unpacked(tensors)[0].tolist() == [0, 0, 0]


def test_what_is_kept_is_loaded_without_another_copy_and_what_a_source_gives_is_not():
    stage = Stage(StageModel(Filled(), None, 1, True, False, CPU), None, lambda *_: nullcontext())
    ids = unpacked(packed((torch.zeros(3), None)))[0]
    assert stage.load((ids, None), shared=True).data.data_ptr() == ids.data_ptr()
    assert stage.load((ids, None)).data.data_ptr() != ids.data_ptr()


class Filled(torch.nn.Module):
    """A layer that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.given = torch.nn.Parameter(torch.ones(3)), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given.append(x.tolist())
        return x.fill_(2) * self.weight


@pytest.mark.parametrize(
    "batch, name", [(({"text": torch.zeros(1)}, None), "dict"), ((torch.zeros(1), "label"), "str")]
)
def test_what_cannot_travel_is_named(batch, name):
    with pytest.raises(RecycleError, match=f"a batch has a {name} in it"):
        packed(batch)
