"""The computation of one pipeline stage, micro-batch by micro-batch.

Holds what lives between the instructions of a micro-batch: its inputs, its graph (stash), and the
weight-gradient work that a split backward has put off.  Gradients end up in ``parameter.grad``,
summed in the order in which the program runs the weight gradients.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Callable

import torch

from recycle_plugin.core.ids import MicroBatch
from recycle_plugin.runtime.split_backward import DeferredWeights, PendingWeights

Tensors = tuple[torch.Tensor, ...]


@dataclass
class Shelf:
    """What one micro-batch has on this worker at the moment."""

    data: Any = None  # input of the first stage
    labels: Any = None
    inputs: Tensors = ()  # received activations, leaves of the graph
    outputs: Tensors = ()
    loss: torch.Tensor | None = None
    grads: Tensors = ()  # received gradients of the outputs
    pending: PendingWeights | None = None
    weights_done: bool = False


@dataclass(frozen=True)
class StageModel:
    """What the stage computes.  ``loss``: of (outputs, labels) on the last stage; ``scale``: the divisor of each
    micro-batch's loss, the logical number of micro-batches of a replica."""

    module: torch.nn.Module
    loss: Callable[[Any, Any], torch.Tensor] | None
    scale: int
    first: bool
    last: bool
    device: torch.device


class Stage:
    """Runs forward and backward of single micro-batches.  ``deferred`` splits the backward, None leaves it fused."""

    def __init__(self, model: StageModel, deferred: DeferredWeights | None, randomness: Callable[[MicroBatch, int], AbstractContextManager]) -> None:
        self._model = model
        self._deferred = deferred
        self._randomness = randomness
        self._shelves: dict[MicroBatch, Shelf] = {}
        self.losses: dict[MicroBatch, torch.Tensor] = {}
        self.peak = 0  # most micro-batches that had an activation, a gradient or weight work here at once

    # --- inputs ------------------------------------------------------------------------------------

    def load(self, micro_batch: MicroBatch, batch: tuple[Any, Any]) -> None:
        """Take the inputs (first stage) and labels (last stage) of ``micro_batch``."""
        shelf = self._shelf(micro_batch)
        if self._model.first:
            shelf.data = _to_device(batch[0], self._model.device)
        if self._model.last:
            shelf.labels = _to_device(batch[1], self._model.device)

    def receive_activation(self, micro_batch: MicroBatch, tensors: Tensors) -> None:
        moved = (tensor.to(self._model.device) for tensor in tensors)
        self._shelf(micro_batch).inputs = tuple(t.requires_grad_(t.is_floating_point()) for t in moved)

    def receive_grad(self, micro_batch: MicroBatch, tensors: Tensors) -> None:
        self._shelves[micro_batch].grads = tuple(tensor.to(self._model.device) for tensor in tensors)

    # --- compute -----------------------------------------------------------------------------------

    def forward(self, micro_batch: MicroBatch, step: int) -> None:
        shelf, model = self._shelves[micro_batch], self._model
        with self._randomness(micro_batch, step):
            outputs = model.module(shelf.data if model.first else _unpack(shelf.inputs))
            if model.last:
                loss = model.loss(outputs, shelf.labels) if model.loss is not None else outputs
                self.losses[micro_batch] = loss.detach()
                shelf.loss = loss / model.scale
            else:
                shelf.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        shelf.data = shelf.labels = None
        self.peak = max(self.peak, len(self._shelves))

    def activation(self, micro_batch: MicroBatch) -> Tensors:
        """What goes to the next stage."""
        return self._shelves[micro_batch].outputs

    def backward(self, micro_batch: MicroBatch) -> None:
        """Both gradients at once."""
        self._run_backward(micro_batch, nullcontext())
        self._weights_done(micro_batch)

    def backward_input(self, micro_batch: MicroBatch) -> None:
        """The gradient of the input; the weights' work is put off until :meth:`backward_weight`."""
        hold = self._deferred.hold() if self._deferred is not None else nullcontext()
        self._shelves[micro_batch].pending = self._run_backward(micro_batch, hold)

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        shelf = self._shelves[micro_batch]
        if shelf.pending is not None:
            shelf.pending.run()
        shelf.pending = None
        self._weights_done(micro_batch)

    def take_grad(self, micro_batch: MicroBatch) -> Tensors:
        """What goes to the previous stage; handed out once."""
        shelf = self._shelves[micro_batch]
        grads, shelf.grads = shelf.grads, ()
        self._settle(micro_batch)
        return grads

    def discard(self) -> None:
        """Forget the unfinished step."""
        self._shelves.clear()
        self.losses.clear()

    def _run_backward(self, micro_batch: MicroBatch, context: AbstractContextManager) -> Any:
        shelf = self._shelves[micro_batch]
        with context as pending:
            if self._model.last:
                shelf.loss.backward()
            else:
                roots = [output for output in shelf.outputs if output.requires_grad]
                torch.autograd.backward(roots, [grad for grad in shelf.grads])
        shelf.grads = tuple(tensor.grad for tensor in shelf.inputs if tensor.requires_grad)
        shelf.inputs, shelf.outputs, shelf.loss = (), (), None
        return pending

    def _weights_done(self, micro_batch: MicroBatch) -> None:
        self._shelves[micro_batch].weights_done = True
        self._settle(micro_batch)

    def _settle(self, micro_batch: MicroBatch) -> None:
        """Free the shelf of a micro-batch that is through with this stage."""
        shelf = self._shelves[micro_batch]
        if shelf.weights_done and not shelf.grads:
            del self._shelves[micro_batch]

    def _shelf(self, micro_batch: MicroBatch) -> Shelf:
        return self._shelves.setdefault(micro_batch, Shelf())


def _unpack(tensors: Tensors) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors


def _to_device(value: Any, device: torch.device) -> Any:
    if torch.is_tensor(value):
        return value.to(device)
    return type(value)(_to_device(item, device) for item in value)
