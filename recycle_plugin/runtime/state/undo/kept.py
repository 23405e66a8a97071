"""What the ways of undo keep: copies of tensors, and the small parts of a stage's state; and what others keep for
them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import torch

from recycle_plugin.runtime.state.stage_state import StageState, TensorForm, form_of


class Keeper(Protocol):
    """Who has the gradients of a step for as long as that may have to be taken back (runtime/stage/gradients.py)."""

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter.grad``, about to be applied, is what :meth:`applied_to` will give."""

    def applied_to(self, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient that the last step has applied to ``parameter``."""


class Copies:
    """Copies of tensors by key, in buffers that are allocated once."""

    def __init__(self) -> None:
        self._buffers: dict[Any, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        return self._buffers[key]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._buffers

    def forms(self) -> dict[Any, TensorForm]:
        """The dtype and shape of each copy."""
        return {key: form_of(buffer) for key, buffer in self._buffers.items()}

    def take(self, sources: Mapping[Any, torch.Tensor]) -> None:
        """Copy ``sources``, and forget keys that are not among them."""
        self._buffers = {key: self._buffer(key, source) for key, source in sources.items()}
        _copy(list(self._buffers.values()), list(sources.values()))

    def put_back(self, targets: Mapping[Any, torch.Tensor]) -> None:
        """Copy into the tensor of each key.

        Not by exchanging storages: parameters and moments may be views into flat buffers, and whoever
        else holds such a buffer has to see the old values too.
        """
        _copy([targets[key] for key in self._buffers], list(self._buffers.values()))

    def _buffer(self, key: Hashable, source: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(key)
        if known is None:
            return torch.empty_like(source)
        fits = known.shape == source.shape and known.dtype == source.dtype and known.device == source.device
        return known if fits else torch.empty_like(source)


class Small:
    """Copies of what goes by value of ``state``, as it was before a step."""

    def __init__(self, state: StageState) -> None:
        self._state = state
        self._parts: dict[str, Any] | None = None

    @property
    def parts(self) -> dict[str, Any]:
        """The copies, by part.  Raises RuntimeError if none were taken."""
        if self._parts is None:
            raise RuntimeError("no step to take back: before_step() was not called, or its step is taken back already")
        return self._parts

    def take(self) -> None:
        """Copy what goes by value as it is now."""
        self._parts = self._state.small()

    def put_back(self) -> None:
        """Put the copies back, which can be done once: what was kept is handed out."""
        self._state.put(self.parts)
        self._parts = None


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
