"""A layer's own forward runs whatever stands around it, and its backward is split behind that wherever it can be.

That the numbers are those of stock is for the differential tester (tests/support/grammar); here is what is still
split, and what is held for it.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from recycle_plugin.runtime.stage.layer_graph import LayerGraph
from recycle_plugin.runtime.stage.split_backward import DeferredWeights
from tests.support.grammar import PIECES, WIDTH
from tests.support.split_backward import KINDS, Checkpointed, activations, block, in_i

SPLIT = {  # uses whose weight gradients wait
    "linear": 1,
    "a mode that rounds weights": 1,
    "a mode that rounds weights by a Function": 1,
    "a mode that rounds what goes in": 1,
    "a mode that rounds an embedding": 1,
    "a device context": 1,
    "F.linear patched": 1,
    "F.embedding patched": 1,
    "nn.Linear.forward patched": 1,
    "nn.Embedding.forward patched": 1,
    "a cast that layers share": 1,
    "another class for a call": 1,
    "a class with layers for a call": 1,
    "a complex layer": 1,
    "saved tensors rounded": 1,
    "saved tensors on the host": 2,
    "saved tensors given out once": 1,
    "saved tensors counted": 1,
    "an adapter beside a frozen layer": 2,
    "a weight frozen for a call": 2,  # its bias is not
    "a hook on all layers": 1,
    "selective checkpointing": 2,
    "embedding with padding": 1,
    "embedding by frequency": 1,
    "keyword argument": 1,
}
FUSED = [
    "a mode that rounds what comes out by a Function",  # which computes for both halves at once
    "F.linear patched by a Function",
    "a dispatch mode that changes numbers",
    "a dispatch mode that changes nothing",
    "a tensor for which F.linear is another",
    "a tensor of a subclass",
    "nested tensors",
]


def split_uses(module: nn.Module) -> int:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        x = torch.randn(4, WIDTH).requires_grad_()
    pending = in_i(DeferredWeights(module), lambda: module(x).sum().backward())
    count = len(pending)
    pending.run()
    return count


@pytest.mark.parametrize("name", [*SPLIT, *FUSED])
def test_what_is_split_with_something_around_a_layer(name):
    assert split_uses(PIECES[name](lambda what, value: None)) == SPLIT.get(name, 0)


def test_checkpointing_loses_no_layer():
    assert [split_uses_of_blocks(kind) for kind in KINDS] == [4] * len(KINDS)


def split_uses_of_blocks(kind: str) -> int:
    model = nn.Sequential(*(Checkpointed(block(), kind) for _ in range(2)))
    pending = in_i(DeferredWeights(model), lambda: model(activations(5, 3, 16)[0]).sum().backward())
    return len(pending)


def held_after_a_forward(split: bool, kind: str, frozen: bool) -> tuple[bool, bool]:
    """Whether the layer's input, and its output, are kept for the backward."""
    layer, kept = nn.Linear(16, 16), []
    layer.weight.requires_grad_(not frozen)

    def run(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        made = layer(hidden)
        kept.extend(StorageWeakRef(one.untyped_storage()) for one in (hidden, made))
        return made + 1

    deferred = DeferredWeights(layer) if split else None
    (x, *_) = activations(5, 16)
    if deferred is None:
        output = checkpoint(run, x, use_reentrant=False) if kind == "checkpoint" else run(x)
    else:
        with deferred.forward():
            output = checkpoint(run, x, use_reentrant=False) if kind == "checkpoint" else run(x)
    gc.collect()
    held = not kept[0].expired(), not kept[1].expired()
    assert output.requires_grad
    return held


@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("kind", ("plain", "checkpoint"))
def test_a_forward_keeps_what_stock_keeps(kind, frozen):
    stock = held_after_a_forward(False, kind, frozen)
    assert held_after_a_forward(True, kind, frozen) == stock
    assert stock == (kind == "plain" and not frozen, False)


def test_w_is_one_run_of_autograd():
    """In the order of the backward: also uses of one weight are summed as in stock."""
    model, ran = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), []
    for name, parameter in model.named_parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, name=name: ran.append((name, torch._C._current_graph_task_id())))
        vars(model).setdefault("kept", []).append(node)
    pending = in_i(DeferredWeights(model), lambda: model(activations(5, 16)[0]).sum().backward())
    assert ran == []
    pending.run()
    assert len({task for _, task in ran}) == 1 and [name[0] for name, _ in ran] == list("33221100")


@pytest.mark.parametrize("until", ("F", "I", "W"))
def test_nothing_of_a_layers_graph_is_left(until):
    """A circle of nodes and Python objects would be freed by nobody."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    deferred, (x, *_) = DeferredWeights(model), activations(5, 16)
    before = graphs()
    with deferred.forward():
        output = model(x).sum()
    assert graphs() == before + 2
    if until != "F":
        with deferred.hold() as pending:
            output.backward()
        if until == "W":
            pending.run()
        del pending
    del output
    assert graphs() == before


def graphs() -> int:
    gc.collect()
    return sum(type(one) is LayerGraph for one in gc.get_objects())
