"""Measure the times of a GPT's layer on one device, with the same code for a CPU and an accelerator."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recycle_plugin.lab.training.compose import GPTModel, compose
from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.stage.split_backward import DeferredWeights, PendingWeights

WARM_UP = 3
IN_A_ROW = 4  # micro-batches between two waits for an accelerator: with one, the start of its kernels would be timed
WAIT_S = 300.0


class LayerTimes(NamedTuple):
    """Microseconds of a micro-batch: of F, I and W with a split backward, and of the fused backward."""

    forward: float
    input: float
    weight: float
    fused: float


class Layer(NamedTuple):
    """A layer as a stage runs it; the backward starts from ``forward(inputs)``."""

    module: nn.Module
    inputs: Tensor
    forward: Callable[[Tensor], Tensor]


class DeviceClock:
    """A clock for work on a device, ``in_a_row`` executions without a wait between them.

    An accelerator executes the work once more before these (``times`` in all). It is then busy when the measured work
    is started, as in a job, where the host is ahead of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._port = device_of(device)
        self.in_a_row, self._before = (1, 0) if device == HOST else (IN_A_ROW, 1)
        self.times = self._before + self.in_a_row

    def of(self, work: Callable[[], object]) -> float:
        """Return the mean seconds of one execution of ``work``."""
        for _ in range(self._before):
            work()
        begun = self._port.event("what comes before")
        for _ in range(self.in_a_row):
            work()
        over = self._port.event("what is measured")
        over.wait(WAIT_S)
        return over.since(begun) / self.in_a_row


def layer_times(
    name: str, batch: int, device: torch.device, dtype: torch.dtype, checkpointing: bool, repeat: int
) -> LayerTimes:
    """Return the times of a transformer layer of the model ``name``, for a micro-batch of ``batch`` sequences. Medians;
    fused and split runs alternate, so that a change of the machine's speed affects both.
    """
    with_group = not dist.is_initialized()
    if with_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made, clock = _layer(name, batch, device, dtype, checkpointing), DeviceClock(device)
        fused, split = [], []
        for _ in range(WARM_UP + repeat):
            fused.append(_once(made, clock, None))
            deferred = DeferredWeights(made.module)
            split.append(_once(made, clock, deferred))
            deferred.restore()
    finally:
        if with_group:
            dist.destroy_process_group()
    halves = (1e6 * median(column[WARM_UP:]) for column in zip(*split))
    return LayerTimes(*halves, 1e6 * median(row[1] for row in fused[WARM_UP:]))


def _layer(name: str, batch: int, device: torch.device, dtype: torch.dtype, checkpointing: bool) -> Layer:
    model = compose([f"model={name}"]).model
    assert isinstance(model, GPTModel), f"{name} is no GPT"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron's, on what is not installed
        from recycle_plugin.lab.training.gpt import GPTShape, gpt_layers

        shape = GPTShape(**{**model.model_dump(exclude={"kind"}), "layers": 1, "tied": False})
        _, spec, _ = gpt_layers(shape, params_dtype=dtype)  # embedding, layer, head
        module = spec.build().to(device)
    hidden = torch.randn(shape.sequence, batch, shape.hidden, device=device, dtype=dtype)

    def saved(x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=False)

    return Layer(module, hidden, saved if checkpointing else module)


def _once(layer: Layer, clock: DeviceClock, deferred: DeferredWeights | None) -> tuple[float, float, float]:
    """Return seconds of F, I and W of one micro-batch; of F, B and 0 if the backward is not split."""
    inputs = [layer.inputs.detach().clone().requires_grad_() for _ in range(clock.times)]
    outputs, left = deque[Tensor](), deque[PendingWeights]()

    def forward() -> None:
        with nullcontext() if deferred is None else deferred.forward():
            outputs.append(layer.forward(inputs.pop()))

    def backward() -> None:
        with nullcontext() if deferred is None else deferred.hold() as pending:
            outputs.popleft().backward(gradient)
        left.append(pending)

    taken = clock.of(forward)
    gradient = torch.randn_like(outputs[0])
    halves = clock.of(backward)
    return taken, halves, 0.0 if deferred is None else clock.of(lambda: left.popleft().run())
