"""fp32 master weights of bf16 or fp16 parameters: what the optimizer steps, and where gradients are summed.

The weights are what the model computes with, and nothing but a rounded copy.  Each micro-batch's gradient comes in
their precision, and is added to the master's in fp32 by itself; so a contribution is the same whoever makes it, and a
sum of many loses nothing of the small ones.  What is infinite in fp16 is so in the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from recycle_plugin.runtime.stage.gradient_store import TorchGradients


class Masters:
    """fp32 copies of ``weights``, in their order, which the optimizer steps; ``gradients``: theirs.

    ``made``: the copies, where the framework's optimizer has made them.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter], made: Sequence[torch.nn.Parameter] | None = None) -> None:
        self.weights = list(weights)
        self.parameters = (
            list(made)
            if made is not None
            else [torch.nn.Parameter(weight.detach().to(torch.float32, copy=True)) for weight in self.weights]
        )
        self._of = dict(zip(self.weights, self.parameters))
        self.gradients, self._made = TorchGradients(self.parameters), TorchGradients(self.weights)

    def of(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        """The master of ``weight``."""
        return self._of[weight]

    def collect(self) -> None:
        """Add the weights' gradients to the masters', in fp32, and drop them."""
        self.gradients.add(self._made.taken())

    def round_off(self) -> None:
        """Round the masters, which have changed, to the weights."""
        _copy(self.weights, self.parameters)

    def take_over(self) -> None:
        """Take the masters from the weights, to whose precision they are then known."""
        _copy(self.parameters, self.weights)


@torch.no_grad()
def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
