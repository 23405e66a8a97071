"""Gradients in buffers of a framework's own, as Megatron's ``main_grad``: a GradientStore that is not torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch


class BufferedGradients:
    """fp32 gradients of ``parameters`` in one flat buffer, to which a hook adds each backward's and drops
    ``parameter.grad``; ``parameter.main_grad`` is a view of it, and is pointed elsewhere for another set.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._accumulators = [one.expand_as(one).grad_fn.next_functions[0][0] for one in self.parameters]
        for parameter, accumulator in zip(self.parameters, self._accumulators, strict=True):
            accumulator.register_hook(partial(_to_main_grad, parameter))
        self.zero()

    def zero(self) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, torch.zeros(sum(sizes)).split(sizes), strict=True):
            parameter.main_grad = part.view(parameter.shape)

    def add(self, gradients: Iterable[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                parameter.main_grad.add_(gradient)

    def view(self) -> list[torch.Tensor | None]:
        return [parameter.main_grad for parameter in self.parameters]

    def swap(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        before = self.view()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.main_grad = torch.zeros(parameter.shape) if gradient is None else gradient
        return before

    def change(self, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for parameter in self.parameters:
            parameter.main_grad = by(parameter.main_grad)


@torch.no_grad()
def _to_main_grad(parameter: torch.nn.Parameter, *_: object) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None
