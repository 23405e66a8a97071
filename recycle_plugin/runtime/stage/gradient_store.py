"""Where a backward adds up weight gradients, and where the optimizer's step finds their sum: a port, and torch's way.

The plugin handles gradients only through this port: it adds a micro-batch's contribution or sets it aside, swaps the
sums of blocks, puts the workers' sum in the contributions' place for STEP, and scales it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

Slots = list[torch.Tensor | None]  # a gradient for each parameter, None where there is none


class GradientStore(Protocol):
    """A framework's gradients: one slot for each of ``parameters``, those that its optimizer steps.

    A backward adds to the slots, and the optimizer's step reads them. A tensor in a slot belongs to the store until
    :meth:`swap` returns it; nobody else may change what :meth:`view` returns.
    """

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters, always in the same order."""

    def zero(self) -> None:
        """Empty all slots. Their tensors' memory stays unchanged: others may still read it."""

    def add(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Add to each slot, in its dtype; an empty slot may take the tensor itself."""

    def view(self) -> Slots:
        """Return the tensor in each slot, no copies."""

    def swap(self, gradients: Sequence[torch.Tensor | None]) -> Slots:
        """Put ``gradients`` themselves into the slots, and return the old ones. None empties a slot."""

    def change(self, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put ``by(gradient)`` into each non-empty slot, one after the other; the old tensors stay unchanged."""


class TorchGradients:
    """The gradients of ``parameters`` where torch keeps them, in ``parameter.grad``."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)

    def train(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have slots for these parameters from now on, all empty."""
        self.zero()
        self.parameters = list(parameters)

    def zero(self) -> None:
        """Empty all slots."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def add(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Add to each slot; an empty slot takes the tensor itself if its dtype is the parameter's."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                there = parameter.grad
                parameter.grad = gradient.to(parameter.dtype) if there is None else there.add_(gradient)

    def view(self) -> Slots:
        """Return the tensor in each slot."""
        return [parameter.grad for parameter in self.parameters]

    def swap(self, gradients: Sequence[torch.Tensor | None]) -> Slots:
        """Put ``gradients`` into the slots, and return what was there."""
        before = self.view()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return before

    def change(self, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put ``by(gradient)`` into each non-empty slot; an old tensor may be freed before the next is made."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = by(parameter.grad)

    def taken(self) -> Iterator[torch.Tensor | None]:
        """Empty each slot and yield its tensor, for :meth:`add` of another store."""
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            yield gradient


@contextmanager
def swapped(store: GradientStore, gradients: Slots) -> Iterator[None]:
    """Return a context in which the slots of ``store`` have ``gradients``, which has the final values afterwards."""
    aside = store.swap(gradients)
    try:
        yield
    finally:
        gradients[:] = store.swap(aside)


def empty(store: GradientStore) -> Slots:
    """Return as many empty slots as ``store`` has."""
    return [None] * len(store.parameters)
