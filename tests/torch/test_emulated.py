"""Emulated layers cost what they are told to, split and fused, and have real gradients.

Sleeps are counted, not timed: nothing here depends on how loaded the machine is.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recycle_plugin.lab.training import emulated
from recycle_plugin.lab.training.emulated import EmulatedLayer
from recycle_plugin.runtime.stage.split_backward import DeferredWeights


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    sleeps: list[float] = []
    monkeypatch.setattr(emulated.time, "sleep", sleeps.append)
    return sleeps


def layers(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(EmulatedLayer(4, forward_s=1, input_s=2, weight_s=4) for _ in range(count)))


@pytest.mark.parametrize("first_stage", (True, False))
def test_stock_backward_costs_both_in_one_go(slept, first_stage):
    output = layers()(torch.ones(3, 4, requires_grad=not first_stage))
    assert slept == [1, 1]
    slept.clear()
    output.sum().backward()
    assert slept == [6, 6]


@pytest.mark.parametrize("first_stage", (True, False))
def test_split_backward_costs_i_then_w(slept, first_stage):
    model = layers()
    deferred = DeferredWeights(model)
    with deferred.forward():
        output = model(torch.ones(3, 4, requires_grad=not first_stage))
    slept.clear()
    with deferred.hold() as pending:
        output.sum().backward()
    assert slept == [2, 2]
    pending.run()
    assert slept == [2, 2, 4, 4]


def test_gradients_are_real_and_bitwise_the_same(slept, assert_bitwise):
    model = layers()
    with torch.no_grad():
        for layer in model:
            layer.scale.copy_(torch.rand(4))
    assert_bitwise(model, [torch.rand(3, 4).requires_grad_() for _ in range(3)])
    x = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model.double(), (x,))


def test_a_negative_cost_is_refused():
    with pytest.raises(ValueError, match="can't be negative: 1, -2, 0 s"):
        EmulatedLayer(4, 1, -2, 0)
