"""fp32 master weights of bf16 or fp16 parameters: the optimizer steps them, and gradients are summed in them.

The model computes with the weights, which are rounded copies. Each micro-batch's gradient has the weights' precision,
and is added to the master's in fp32 by itself. So a contribution does not depend on the worker that makes it, and a sum
of many loses no small ones. Infinities of fp16 stay infinite in the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from recycle_plugin.runtime.stage.gradient_store import TorchGradients


class Masters:
    """fp32 copies of ``weights``, in their order, which the optimizer steps; ``gradients``: theirs. ``made``: the
    copies, if the framework's optimizer has made them.
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
        """Return the master of ``weight``."""
        return self._of[weight]

    def collect(self) -> None:
        """Add the weights' gradients to the masters', in fp32, and drop them."""
        self.gradients.add(self._made.taken())

    def round_off(self) -> None:
        """Round the changed masters to the weights."""
        _copy(self.weights, self.parameters)

    def take_over(self) -> None:
        """Set the masters from the weights, as far as these are precise."""
        _copy(self.parameters, self.weights)


@torch.no_grad()
def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
