"""The bytes that a micro-batch holds on a stage between its forward and its weight gradients, counted once.

Each storage counts once; those of parameters and buffers do not count. Hooks see what autograd saves in the first
forward, which is run only for a check (runtime/stage/repeatable.py), so other forwards are not affected.
``torch.func``'s functions refuse such hooks: from the first one on nothing is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from recycle_plugin.runtime.devices.port import Tensors
from recycle_plugin.runtime.stage.gradient_store import Slots
from recycle_plugin.runtime.stage.split_backward import PendingWeights

autograd: Any = torch._C._autograd


class HeldBytes:
    """Bytes of a micro-batch on the stage of ``module``; None if they were not counted. ``activation``: from F until I
    or B, inputs and outputs included. ``pending``: from I until W. ``boundary``: sent to the next stage.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.activation: int | None = None
        self.pending: int | None = None
        self.boundary: int | None = None

    def forward(self, run: Callable[[], Tensors], inputs: Tensors) -> Tensors:
        """Run a forward of ``inputs`` and return its outputs; count what its graph holds then. Nothing is counted if
        part of the forward allows no hooks on saved tensors.
        """
        saved: list[weakref.ref[_Saved]] = []
        with _seen(saved) as complete:
            outputs = run()
        if not complete():
            return outputs
        alive = [each.tensor for one in saved if (each := one()) is not None]
        self.activation = self._count((*alive, *inputs, *outputs))
        self.boundary = sum(tensor.nbytes for tensor in outputs)
        return outputs

    def left(self, pending: PendingWeights | None, early: Slots | None) -> None:
        """Count the bytes that an I leaves for W, the first time."""
        if self.pending is None:
            made = () if early is None else tuple(each for each in early if each is not None)
            self.pending = (0 if pending is None else pending.nbytes) + self._count(made)

    def _count(self, tensors: Iterable[torch.Tensor]) -> int:
        own = {place for place, _ in _storages((*self._module.parameters(), *self._module.buffers()))}
        return sum(size for place, size in dict(_storages(tensors)).items() if place not in own)


class _Saved:
    """A tensor that a graph has saved. This object lives as long as the graph needs it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        whole = is_traceable_wrapper_subclass(tensor)  # such a class has no plain ``.data``
        # hidden from modes
        with torch._C.DisableTorchFunction(), _disable_current_modes() if whole else torch._C._DisableTorchDispatch():
            # without its graph: an operator that saves its own output would hold itself, and never be freed
            self.tensor = tensor.detach() if whole else tensor.data


@contextmanager
def _seen(saved: list[weakref.ref[_Saved]]) -> Iterator[Callable[[], bool]]:
    """Return a context in which ``saved`` gets what graphs save; it yields a function: is that all so far?"""
    refuse, seeing = autograd._saved_tensors_hooks_disable, True

    def pack(tensor: torch.Tensor) -> _Saved:
        kept = _Saved(tensor)
        saved.append(weakref.ref(kept))
        return kept

    def disable(*how: Any) -> None:
        nonlocal seeing
        try:
            refuse(*how)
        except RuntimeError:  # there are hooks, ours or the forward's own
            if not seeing:
                raise
            seeing = False
            autograd._pop_saved_tensors_default_hooks()
            refuse(*how)

    autograd._push_saved_tensors_default_hooks(pack, lambda kept: kept.tensor)
    autograd._saved_tensors_hooks_disable = disable
    try:
        yield lambda: seeing
    finally:
        autograd._saved_tensors_hooks_disable = refuse
        if seeing:
            autograd._pop_saved_tensors_default_hooks()


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of the tensors' storages; a tensor without one counts by itself."""
    for tensor in (part for each in tensors for part in _parts(each)):
        try:
            storage = tensor.untyped_storage()
            place = storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse, a functorch wrapper, or a framework's own class
            place = id(tensor), tensor.numel() * tensor.element_size()
        yield place


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a wrapper class, such as a nested tensor; else the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))
