"""Layers that cost what they are told to: schedules can be measured without the compute.

``time.sleep`` is the emulated compute here.  A sleeping worker leaves its core to others, so that many
workers on few cores keep the stage times that a job on accelerators would have.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from recycle_plugin.runtime.stage.operators import Converter, Gradients, Operator, register_converter


class EmulatedLayer(nn.Module):
    """A layer that computes ``x * scale`` on floats [batch, width], and sleeps for the stated seconds in F, I and W.

    Stock backward sleeps ``input_s + weight_s`` in one go; under ``DeferredWeights.hold`` I sleeps the one and
    ``pending.run()`` the other.  ``scale [width]``, all ones at first, has a real gradient.

    Raises ValueError for a negative cost.
    """

    def __init__(self, width: int, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        if min(forward_s, input_s, weight_s) < 0:
            raise ValueError(f"costs of an emulated layer can't be negative: {forward_s}, {input_s}, {weight_s} s")
        self.forward_s, self.input_s, self.weight_s = forward_s, input_s, weight_s
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """The input times ``scale``, after ``forward_s`` seconds."""
        return _Stock.apply(x, self.scale, self)


class _Stock(torch.autograd.Function):
    """The layer without a conversion."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, layer: EmulatedLayer) -> Tensor:
        ctx.save_for_backward(x)
        ctx.operator = _EmulatedOperator(layer)
        return ctx.operator.forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        time.sleep(ctx.operator.layer.input_s + ctx.operator.layer.weight_s * wanted)
        return gradient * ctx.operator.layer.scale, _scale_gradient(x, gradient) if wanted else None, None


class _EmulatedOperator:
    def __init__(self, layer: EmulatedLayer) -> None:
        self.layer = layer
        self.parameters = (layer.scale,)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.layer.forward_s)
        return x * self.layer.scale

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        time.sleep(self.layer.input_s)
        return gradient * self.layer.scale

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> Gradients:
        time.sleep(self.layer.weight_s)
        yield self.layer.scale, _scale_gradient(x, gradient)


def _scale_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    return (gradient * x).reshape(-1, x.shape[-1]).sum(0)


def _split(layer: EmulatedLayer, x: Tensor) -> tuple[Operator, Tensor]:
    # the first stage's data requires no gradient, but its I has to cost what every other stage's does
    return _EmulatedOperator(layer), x if x.requires_grad else x.detach().requires_grad_()


register_converter(EmulatedLayer, Converter("forward", _split))
