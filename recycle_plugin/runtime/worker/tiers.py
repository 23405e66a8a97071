"""Where a real worker's store keeps tensors (core.worker.step_store.Tier)."""

from __future__ import annotations

from typing import Any

from recycle_plugin.runtime.devices.accelerator import Accelerator, plain
from recycle_plugin.runtime.devices.kept import Kept
from recycle_plugin.runtime.devices.port import Copy, Device, Tensors

FOR_A_PEER = "what goes to a peer"


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
            return self._device.to_host(value, FOR_A_PEER, shared=True)
        kept: Copy = value
        return kept

    def weigh(self, kept: Copy) -> int:
        return kept.nbytes


class OnDevice(Host):
    """Keeps tensors on the accelerator, from which they can be sent; in host memory too where a job ``logs`` them, and
    else only once somebody asks for that.
    """

    def __init__(self, device: Accelerator, logs: bool) -> None:
        super().__init__(device)
        self._accelerator, self._lane, self._logs = device, device.lane(), logs

    def keep(self, value: Any) -> Copy:
        """The tensors as they are; what is a copy already stays so."""
        if type(value) is not tuple:
            return super().keep(value)
        tensors: Tensors = tuple(map(plain, value))
        mark = self._lane.mark()

        def begin() -> Copy:
            with self._lane.behind(mark):
                return self._accelerator.to_host(tensors, FOR_A_PEER, shared=True)

        kept = Kept(tensors, begin)
        if self._logs:
            kept.begin()
        return kept
