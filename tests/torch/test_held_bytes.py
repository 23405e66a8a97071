"""What a graph holds of a micro-batch, counted once: only what is still held, and nothing of the module itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from recycle_plugin.runtime.stage.held_bytes import HeldBytes
from recycle_plugin.runtime.stage.split_backward import DeferredWeights

ROWS, WIDTH = 5, 8
ONE = ROWS * WIDTH * 4  # bytes of what goes from layer to layer


@pytest.fixture
def module() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def given() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def test_storages_count_once_and_parameters_and_what_is_dropped_do_not(module):
    """Each linear layer has saved its input, and each tanh its output."""
    held, x = HeldBytes(module), given()

    def run() -> tuple[torch.Tensor, ...]:
        module(x)  # of which nothing is kept
        return (module(x),)

    (made,) = held.forward(run, (x,))
    assert (held.activation, held.boundary) == (3 * ONE, ONE)  # x, and what both tanh have made
    made.sum().backward()
    assert all(each.grad is not None for each in module.parameters())


def test_of_a_nested_tensor_that_counts_which_it_consists_of(module):
    held, x = HeldBytes(module), given()

    def run() -> tuple[torch.Tensor, ...]:
        offsets = torch.tensor([0, 2, ROWS])
        return (torch.nested.nested_tensor_from_jagged(x, offsets).sin().values(),)

    (made,) = held.forward(run, (x,))
    assert held.activation == 2 * ONE + 3 * 8, "x, its sine, and the offsets"
    made.sum().backward()


def test_a_checkpointed_layer_holds_its_input(module):
    held, x = HeldBytes(module), given()
    held.forward(lambda: (checkpoint(module, x, use_reentrant=False),), (x,))
    assert held.activation == 2 * ONE  # and what it has made


def test_what_a_split_backward_leaves_counts_too(module):
    held, x, deferred = HeldBytes(module), given(), DeferredWeights(module)
    with deferred.forward():
        (made,) = held.forward(lambda: (module(x),), (x,))
    with deferred.hold() as pending:
        made.sum().backward()
    held.left(pending, [torch.zeros(3), None])
    assert held.activation == 3 * ONE and held.pending == 4 * ONE + 12  # input and gradient of each linear layer
    held.left(None, None)
    assert held.pending == 4 * ONE + 12, "it is the first that counts"


def test_a_forward_that_allows_no_hooks_is_not_counted_and_runs_once_as_well(module):
    """Of what it does before the part that allows none, such as running statistics, all would be twice."""
    held, x, runs = HeldBytes(module), given(), []

    def run() -> tuple[torch.Tensor, ...]:
        runs.append(1)
        return (module(x) + torch.func.grad(lambda each: module(each).sum())(x) * module(x),)

    (made,) = held.forward(run, (x,))
    assert held.activation is None and len(runs) == 1
    assert torch.equal(made, run()[0])
    made.sum().backward()
    with saved_tensors_hooks(lambda kept: kept, lambda kept: kept), pytest.raises(RuntimeError, match="hooks"):
        run()


def test_hooks_of_the_forward_itself_are_refused_as_torch_refuses_them(module):
    def run() -> tuple[torch.Tensor, ...]:
        with saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
            return (torch.func.grad(lambda each: module(each).sum())(given()),)

    for call in (run, lambda: HeldBytes(module).forward(run, ())):
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            call()
        torch.func.grad(lambda each: each.sum())(given())  # none are left


def test_an_error_of_the_forward_is_its_own(module):
    def run() -> tuple[torch.Tensor, ...]:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        HeldBytes(module).forward(run, ())


def test_no_mode_around_sees_that_it_is_counted(module):
    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def hooked(call):
        with saved_tensors_hooks(lambda kept: kept, lambda kept: kept):  # with any, torch itself detaches less
            call()

    x, runs = given(), []
    for run in (hooked, lambda call: HeldBytes(module).forward(call, (x,))):
        seen: list[str] = []
        with Counts():
            run(lambda: (module(x),))
        runs.append(seen)
    assert runs[0] == runs[1] != []
