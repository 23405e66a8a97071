"""Where a real worker's store keeps tensors (core.worker.step_store.Tier)."""

from __future__ import annotations

from typing import Any

from recycle_plugin.runtime.device import Copy, Device, Tensors


class AsMade:
    """Where they are made."""

    def keep(self, value: Any) -> Any:
        return value

    def weigh(self, kept: Tensors) -> int:
        """In bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)


class Host:
    """Memory from which they can be sent, or on their way there: keeping them costs an accelerator nothing.

    Shared: what is in a store is not changed in place.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def keep(self, value: Any) -> Copy:
        if type(value) is tuple:  # of tensors; else it is a Copy already, which may be a named tuple
            return self._device.to_host(value, "what goes to a peer", shared=True)
        return value

    def weigh(self, kept: Copy) -> int:
        """In bytes."""
        return kept.nbytes
