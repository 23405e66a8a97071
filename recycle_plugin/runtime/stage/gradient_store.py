"""Where a backward adds weight gradients up, and where the optimizer's step finds their sum: a port, and torch's way.

All that the plugin does to gradients it does by this port: a micro-batch's contribution is added, or set aside; sums of
blocks take each other's place; the sum over the workers takes the contributions' place for a STEP, and is scaled there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

Slots = list[torch.Tensor | None]  # a gradient for each parameter, None where there is none


class GradientStore(Protocol):
    """A framework's gradients: one slot for each of ``parameters``, which are those that its optimizer steps.

    A backward adds to what is in the slots, and the optimizer's step reads it there.  A tensor in a slot belongs to the
    store until :meth:`swap` gives it back; what :meth:`view` gives nobody else may change.
    """

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters, always in the same order."""

    def zero(self) -> None:
        """Empty all slots.  The memory of what was there stays as it is: others may still read it."""

    def add(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Add to each slot, in the slot's dtype; an empty one may have the very tensor then."""

    def view(self) -> Slots:
        """The tensor in each slot, no copy."""

    def swap(self, gradients: Sequence[torch.Tensor | None]) -> Slots:
        """Put ``gradients`` into the slots, the tensors themselves, and return what was there.

        None makes an empty slot, to which a backward may add.
        """

    def change(self, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put ``by(gradient)`` into each slot that is not empty, one after another; what was there stays as it is."""


class TorchGradients:
    """The gradients of ``parameters`` where torch has them, in ``parameter.grad``."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)

    def train(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have slots for these from now on; all are empty."""
        self.zero()
        self.parameters = list(parameters)

    def zero(self) -> None:
        """Empty all slots."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def add(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Add to each slot; an empty one takes the tensor itself if it has the parameter's dtype."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                there = parameter.grad
                parameter.grad = gradient.to(parameter.dtype) if there is None else there.add_(gradient)

    def view(self) -> Slots:
        """The tensor in each slot."""
        return [parameter.grad for parameter in self.parameters]

    def swap(self, gradients: Sequence[torch.Tensor | None]) -> Slots:
        """Put ``gradients`` into the slots, and return what was there."""
        before = self.view()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return before

    def change(self, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put ``by(gradient)`` into each slot that is not empty; what was there may go before the next is made."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = by(parameter.grad)

    def taken(self) -> Iterator[torch.Tensor | None]:
        """The tensor of each slot, which is empty from then on: for :meth:`add` of another store."""
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            yield gradient


@contextmanager
def swapped(store: GradientStore, gradients: Slots) -> Iterator[None]:
    """Have ``gradients`` in the slots of ``store`` inside of this context; the list has what became of them then."""
    aside = store.swap(gradients)
    try:
        yield
    finally:
        gradients[:] = store.swap(aside)


def empty(store: GradientStore) -> Slots:
    """As many empty slots as ``store`` has."""
    return [None] * len(store.parameters)
