"""Where a real worker's store keeps tensors (core.worker.step_store.Tier)."""

from __future__ import annotations

from typing import Any

from recycle_plugin.runtime.devices.port import Copy, Device, Tensors


class AsMade:
    """Keeps tensors as and where they were made."""

    def keep(self, value: Any) -> Any:
        """The value itself."""
        return value

    def weigh(self, kept: Tensors) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)


class Host:
    """Keeps tensors in host memory, from which they can be sent, or on their way there.

    Keeping them costs an accelerator nothing.  Memory is shared: what is in a store is not changed in place.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def keep(self, value: Any) -> Copy:
        """Start the copy to host memory; what is a copy already stays so."""
        if type(value) is tuple:  # of tensors; else it is a Copy already, which may be a named tuple
            return self._device.to_host(value, "what goes to a peer", shared=True)
        kept: Copy = value
        return kept

    def weigh(self, kept: Copy) -> int:
        return kept.nbytes
