"""Each GradientStore keeps the port's promises, and a stage computes the same with either, sums of blocks included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.stage.block_sums import ALONE, BlockSums
from recycle_plugin.runtime.stage.gradient_store import GradientStore, TorchGradients, empty, swapped
from recycle_plugin.runtime.stage.ports import StageModel
from recycle_plugin.runtime.stage.randomness import keyed
from recycle_plugin.runtime.stage.split_backward import DeferredWeights
from recycle_plugin.runtime.stage.stage import Stage
from tests.support.buffered_gradients import BufferedGradients
from tests.support.stored_stage import StoredStage

STORES = {"torch's": TorchGradients, "a buffer": BufferedGradients}
stores = pytest.mark.parametrize("kind", STORES)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]


def filled(store: GradientStore, value: float) -> list[torch.Tensor | None]:
    return [torch.full(parameter.shape, value) for parameter in store.parameters]


def values(store: GradientStore) -> list[float]:
    return [0.0 if each is None else each.unique().item() for each in store.view()]


@stores
def test_what_is_added_is_added_to_what_is_there(kind):
    store = STORES[kind](parameters())
    store.add(filled(store, 1.0))
    store.add([None, torch.full((4,), 2.0)])
    assert values(store) == [1.0, 3.0]
    store.zero()
    assert values(store) == [0.0, 0.0]


@stores
def test_a_backward_adds_to_what_is_in_the_slots(kind):
    one, other = parameters()
    store = STORES[kind]([one, other])
    for _ in range(2):
        (one.sum() + 3 * other.sum()).backward()
    assert values(store) == [2.0, 6.0]


@stores
def test_what_is_swapped_in_is_that_very_tensor_and_what_was_there_stays_as_it_is(kind):
    one, other = parameters()
    store, sums = STORES[kind]([one, other]), [torch.ones(2, 3), torch.ones(4)]
    store.add(filled(store, 5.0))
    before = store.swap(sums)
    assert all(mine is theirs for mine, theirs in zip(store.view(), sums, strict=True))
    store.change(lambda each: each * 2)
    assert values(store) == [2.0, 2.0] and sums[0].unique() == 1.0
    store.zero()
    (one.sum() + other.sum()).backward()
    assert [each.unique().item() for each in before] == [5.0, 5.0]


@stores
def test_a_set_that_is_swapped_in_for_a_while_has_what_was_added_then(kind):
    one, other = parameters()
    store = STORES[kind]([one, other])
    store.add(filled(store, 5.0))
    aside = empty(store)
    for _ in range(2):
        with swapped(store, aside):
            one.sum().backward()
    assert aside[0].unique() == 2.0 and values(store) == [5.0, 5.0]


def run(kind: str, block: int | None, split: bool) -> list[torch.Tensor]:
    """A step's sums, of four micro-batches, of which one is run for its boundary tensor once more."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(0.3), nn.Linear(6, 6))
    store = STORES[kind](module.parameters())
    model = StageModel(module, nn.functional.mse_loss, 2, True, True, CPU, gradients=store)
    blocks = None if block is None else BlockSums(store, Policy(block=block).blocks(Topology(2, 1, 2)))
    draws = lambda micro_batch, step, half: keyed(micro_batch.replica * 10 + micro_batch.index, CPU)
    stage = StoredStage(Stage(model, DeferredWeights(module) if split else None, draws, blocks))
    for replica in (0, 1):
        for index in (0, 1):
            key = 1, MicroBatch(replica, index)
            generator = torch.Generator().manual_seed(replica * 10 + index)
            stage.load(key, (torch.randn(3, 6, generator=generator), torch.randn(3, 6, generator=generator)))
            stage.forward(key)
            if split:
                stage.backward_input(key)
                stage.backward_weight(key)
            else:
                stage.backward(key)
    if blocks is None:
        return [each.clone() for each in store.view()]
    return [blocks.total([place], blocks.owners(ALONE), ALONE) for place in range(len(store.parameters))]


@pytest.mark.parametrize("split", (False, True), ids=("fused", "split"))
@pytest.mark.parametrize("block", (None, 1, 2), ids=("one sum", "each", "replicas"))
def test_a_stage_makes_the_same_in_either(block, split):
    ours, theirs = run("torch's", block, split), run("a buffer", block, split)
    assert all(map(torch.equal, ours, theirs))
