"""Layers of a stated cost, to measure schedules without the compute.

``time.sleep`` is the emulated compute. A sleeping worker leaves its core to others, so many workers on few cores keep
the stage times of a job on accelerators.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recycle_plugin.runtime.stage.converters import Call, Converter, Halves, register_converter


class EmulatedLayer(nn.Module):
    """A layer that computes ``x * scale`` on floats [batch, width], and sleeps for the stated seconds in F, I and W.

    A stock backward sleeps ``input_s + weight_s`` in one go. Under ``DeferredWeights.hold`` I sleeps ``input_s``, and
    ``pending.run()`` sleeps ``weight_s``. ``scale [width]``, initially ones, has a real gradient. Raises ValueError for
    a negative cost.
    """

    def __init__(self, width: int, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        if min(forward_s, input_s, weight_s) < 0:
            raise ValueError(f"costs of an emulated layer can't be negative: {forward_s}, {input_s}, {weight_s} s")
        self.forward_s, self.input_s, self.weight_s = forward_s, input_s, weight_s
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input times ``scale``, after ``forward_s`` seconds."""
        # The first stage's data requires no gradient, but its backward has to cost as much as every other stage's.
        return _Emulated.apply(_differentiable(x), self.scale, self)


class _Emulated(Halves):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, layer: EmulatedLayer) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        time.sleep(layer.forward_s)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        layer, (of_x, of_scale) = ctx.layer, Halves.asked(ctx)
        time.sleep(layer.input_s * of_x + layer.weight_s * of_scale)
        made = gradient * layer.scale if of_x else None
        return made, (gradient * x).reshape(-1, x.shape[-1]).sum(0) if of_scale else None, None


def _differentiable(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


def _call(layer: EmulatedLayer, x: Tensor) -> Call:
    return partial(EmulatedLayer.forward, layer), _differentiable(x)


register_converter(EmulatedLayer, Converter(call=_call))
