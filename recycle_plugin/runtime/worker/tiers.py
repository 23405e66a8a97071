"""Where a real worker's store keeps tensors (core.worker.step_store.Tier)."""

from __future__ import annotations

from typing import Any

from recycle_plugin.runtime.devices.accelerator import Accelerator
from recycle_plugin.runtime.devices.host import plain
from recycle_plugin.runtime.devices.kept import Kept
from recycle_plugin.runtime.devices.port import Copy, Device, Tensors

FOR_A_PEER = "what goes to a peer"


class AsMade:
    """Keeps tensors as and where they were made."""

    def keep(self, value: Any) -> Any:
        """Return the value itself."""
        return value

    def weigh(self, kept: Tensors) -> int:
        return sum([tensor.nbytes for tensor in kept])


class Host:
    """Keeps tensors in host memory, or on their way there, ready to be sent. It costs an accelerator no memory. Host
    memory is shared: nothing in a store is changed in place.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def keep(self, value: Any) -> Copy:
        """Start the copy to host memory; a Copy is returned as it is."""
        if type(value) is tuple:  # of tensors; a Copy may be a named tuple
            return self._device.to_host(value, FOR_A_PEER, shared=True)
        kept: Copy = value
        return kept

    def weigh(self, kept: Copy) -> int:
        return kept.nbytes


class OnDevice(Host):
    """Keeps tensors on the accelerator, ready to be sent; in host memory too if the job ``logs``, else on request."""

    def __init__(self, device: Accelerator, logs: bool) -> None:
        super().__init__(device)
        self._accelerator, self._lane, self._logs = device, device.lane(), logs

    def keep(self, value: Any) -> Copy:
        """Keep the tensors as they are; a Copy is returned as it is."""
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
