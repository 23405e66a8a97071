"""What an optimizer, a scheduler and layers have to be, and the line for each that they are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.fitness import check_layers, check_optimizer, check_scheduler


class Plain(torch.optim.Optimizer):
    """As many scripts write theirs: without a closure, which nothing here gives."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self) -> None: ...


class Closing(Plain):
    def step(self, closure) -> None: ...


class Free(Plain):
    def step(self, *arguments, **named) -> None: ...


@pytest.mark.parametrize("kind", [Plain, Free, torch.optim.SGD])
def test_an_optimizer_that_steps_without_arguments_is_taken(kind):
    module = nn.Linear(2, 2)
    check_optimizer(module, optimizer := kind(module.parameters()))
    torch.optim.lr_scheduler.LinearLR(optimizer)  # which puts a function of its own in the place of step()
    check_optimizer(module, optimizer)


@pytest.mark.parametrize("kind", [Closing, torch.optim.LBFGS])
def test_one_that_needs_a_closure_is_not(kind):
    module = nn.Linear(2, 2)
    with pytest.raises(RecycleError, match=rf"{kind.__name__}.step\(\) needs 'closure'"):
        check_optimizer(module, kind(module.parameters()))


class Bare:
    """Has neither a state_dict nor a base class."""

    def step(self) -> None: ...


def test_a_scheduler_is_what_can_be_stepped_without_a_metric():
    optimizer = Plain(nn.Linear(2, 2).parameters())
    for taken in (None, Bare(), torch.optim.lr_scheduler.LinearLR(optimizer)):
        check_scheduler(taken)
    with pytest.raises(RecycleError, match="ReduceLROnPlateau.step.. needs 'metrics'"):
        check_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(RecycleError, match="the scheduler is a function, without a step"):
        check_scheduler(lambda optimizer: Bare())


def test_a_layer_without_weights_yet_is_named():
    with pytest.raises(RecycleError, match="1 has no weights before its first forward"):
        check_layers(nn.Sequential(nn.Tanh(), nn.LazyLinear(2)))


@pytest.mark.parametrize("model", (nn.BatchNorm1d(2), torch.compile(nn.Linear(2, 2))), ids=("statistics", "compiled"))
def test_a_model_that_is_refused_itself_is_named(model):
    with pytest.raises(RecycleError, match="^the model "):
        check_layers(model)
