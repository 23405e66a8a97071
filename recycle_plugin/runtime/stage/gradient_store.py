"""The storage of weight gradients: a port, and its implementation by ``parameter.grad``.

A backward adds gradients there, and the optimizer's step reads their sum. The plugin touches gradients only through
this port. It adds a micro-batch's contribution or sets it aside, swaps the sums of blocks (recycle.exact), and replaces
the worker's own sum by the sum over the workers, which it may scale, before STEP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

Slots = list[torch.Tensor | None]  # a gradient for each parameter, None where there is none


class GradientStore(Protocol):
    """A framework's gradients: one slot for each of ``parameters``, those that its optimizer steps.

    A tensor in a slot belongs to the store until :meth:`swap` returns it; callers may not change the tensors that
    :meth:`view` returns.
    """

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters, always in the same order."""

    def zero(self) -> None:
        """Empty all slots. Their tensors' memory stays unchanged: others may still read it."""

    def add(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Add a gradient to each slot, in the slot's dtype. An empty slot may keep the given tensor itself."""

    def view(self) -> Slots:
        """Return the tensor in each slot, not a copy."""

    def swap(self, gradients: Sequence[torch.Tensor | None]) -> Slots:
        """Put ``gradients``, not copies, into the slots, and return the old tensors. None empties a slot."""

    def change(self, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put ``by(gradient)`` into each non-empty slot, one after the other; the old tensors stay unchanged."""


class TorchGradients:
    """The gradients of ``parameters`` where torch keeps them, in ``parameter.grad``."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)

    def train(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace the slots by empty ones for ``parameters``."""
        self.zero()
        self.parameters = list(parameters)

    def zero(self) -> None:
        """Empty all slots."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def add(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Add a gradient to each slot. An empty slot keeps the given tensor itself if it has the parameter's dtype."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                there = parameter.grad
                parameter.grad = gradient.to(parameter.dtype) if there is None else there.add_(gradient)

    def view(self) -> Slots:
        """Return the tensor in each slot."""
        return [parameter.grad for parameter in self.parameters]

    def swap(self, gradients: Sequence[torch.Tensor | None]) -> Slots:
        """Put ``gradients`` into the slots, and return the old tensors."""
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
    """Return a context in which the slots of ``store`` hold ``gradients``. On exit the list gets the slots' final
    tensors, and the slots their former ones.
    """
    aside = store.swap(gradients)
    try:
        yield
    finally:
        gradients[:] = store.swap(aside)


def empty(store: GradientStore) -> Slots:
    """Return as many empty slots as ``store`` has."""
    return [None] * len(store.parameters)
