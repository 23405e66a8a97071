"""What undo keeps: copies of tensors, and small parts of a stage's state; and the port to gradients kept elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

import torch

from recycle_plugin.runtime.devices.host import on_host
from recycle_plugin.runtime.devices.kinds import device_of, write
from recycle_plugin.runtime.devices.port import COPY_S, Copy
from recycle_plugin.runtime.state.stage_state import StageState


class Keeper(Protocol):
    """Keeps the gradients of a step while it may be taken back (runtime/stage/gradients.py)."""

    def holds(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
        """Return whether :meth:`applied_to` will return ``gradient``, which is about to be applied to ``parameter``."""

    def applied_to(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the gradient that the last step applied to ``parameter``."""


class KeptCopies:
    """Copies of tensors by key, on their device, in buffers allocated once: no later step may lack memory for them."""

    def __init__(self) -> None:
        self._buffers: dict[Any, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        return self._buffers[key]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._buffers

    def start(self, sources: Callable[[], Mapping[Any, torch.Tensor]]) -> None:
        """Do nothing: copies are made at once, when needed."""

    def take(self, sources: Mapping[Any, torch.Tensor]) -> None:
        """Copy ``sources``, and forget other keys."""
        self._buffers = {key: self._buffer(key, source) for key, source in sources.items()}
        _copy(list(self._buffers.values()), list(sources.values()))

    def put_back(self, targets: Mapping[Any, torch.Tensor]) -> None:
        """Copy each value into the tensor of its key. Storages are not exchanged: parameters and moments may be views
        into flat buffers, whose other holders must see the old values too.
        """
        _copy([targets[key] for key in self._buffers], list(self._buffers.values()))

    def _buffer(self, key: Hashable, source: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(key)
        if known is None:
            return torch.empty_like(source)
        fits = known.shape == source.shape and known.dtype == source.dtype and known.device == source.device
        return known if fits else torch.empty_like(source)


class HostCopies:
    """Copies of tensors by key in host memory, made by an accelerator beside its computing; pinned memory is reused."""

    def __init__(self) -> None:
        self._copies: list[tuple[list[Any], Copy]] = []  # (keys, copy) of each device's
        self._of: dict[Any, tuple[torch.Tensor, int]] = {}  # each source, with its version

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for _, copy in self._copies)

    def start(self, sources: Callable[[], Mapping[Any, torch.Tensor]]) -> None:
        """Begin to copy ``sources()``, which must not change before :meth:`take`; goes on if that has begun. Host
        tensors are copied at once: they have no other memory to stay in.
        """
        self._start(sources())

    def _start(self, sources: Mapping[Any, torch.Tensor]) -> None:
        if self._began_with(sources):
            return
        self._copies = []  # first, to free their memory
        self._of = {key: (source, source._version) for key, source in sources.items()}
        for here in (True, False):
            keys = [key for key, source in sources.items() if on_host(source) is here]
            if keys:
                device, given = device_of(sources[keys[0]].device), [sources[key] for key in keys]
                copy = device.to_host(given, "what takes a step back", shared=not here, apart=True)
                self._copies.append((keys, copy))

    def take(self, sources: Mapping[Any, torch.Tensor]) -> None:
        """Have copies of the present ``sources``: those begun, or new ones if something has changed."""
        self._start(sources)
        for _, copy in self._copies:
            copy.wait(COPY_S)
        self._of = {}  # the coming step changes them

    def put_back(self, targets: Mapping[Any, torch.Tensor]) -> None:
        """Copy each value into the tensor of its key."""
        for keys, copy in self._copies:
            for key, value in zip(keys, copy.wait(COPY_S), strict=True):
                write(targets[key], value, "what a step is taken back to")

    def _began_with(self, sources: Mapping[Any, torch.Tensor]) -> bool:
        return self._of.keys() == sources.keys() and all(
            self._of[key][0] is source and self._of[key][1] == source._version for key, source in sources.items()
        )


class Small:
    """Copies of the values in ``state``, from before a step."""

    def __init__(self, state: StageState) -> None:
        self._state = state
        self._parts: dict[str, Any] | None = None

    @property
    def parts(self) -> dict[str, Any]:
        """The copies, by part. Raises RuntimeError if there are none."""
        if self._parts is None:
            raise RuntimeError("no step to take back: before_step() was not called, or its step is taken back already")
        return self._parts

    def take(self) -> None:
        """Copy the present values."""
        self._parts = self._state.small()

    def put_back(self) -> None:
        """Put the copies back; works once, since the copies themselves are handed out."""
        self._state.put(self.parts)
        self.forget()

    def forget(self) -> None:
        self._parts = None


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
