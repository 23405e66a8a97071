"""A link on an accelerator whose operations count only once all members have seen them end.

An aborted NCCL kernel stops waiting and goes on: it passes garbage to its neighbours, with the flags that announce data
(NVIDIA/nccl, src/device/prims_ll.h, readLL and storeLL). So if one member learns of a loss early and aborts, the
kernels of the other members may end well with garbage, which their hosts cannot detect. Only results that were complete
on all members before the first abort are right. Therefore each member enters a barrier in host memory after each
operation that ended while its link was intact. An aborting member never enters that barrier, nor does a dead one.
"""

from __future__ import annotations

from collections.abc import Callable

from recycle_plugin.runtime.collectives.link import Barrier, Handle, Link, Operation, unheard


class ConfirmedLink:
    """The link ``device``, whose handles end in call order, confirmed over ``host``, of the same members; owns both."""

    def __init__(self, device: Link, host: Link) -> None:
        self.generation = device.generation
        self.device, self._host = device, host

    @property
    def connected(self) -> bool:
        """Whether both links are connected to all members."""
        return self.device.connected and self._host.connected

    def connect(self) -> Handle:
        """Start connecting both links. The returned handle is the device link's, and names the missing members."""
        self._host.connect()
        return self.device.connect()

    def start(self, operation: Operation, launched: Callable[[], object] = unheard) -> Handle:
        """Start ``operation`` on the device. Its handle succeeds once all members have seen it end."""
        here = self.device.start(operation, launched)
        everywhere = Handle(here.what)
        here.when_over(lambda: self._confirm(here, everywhere))
        return everywhere

    def _confirm(self, here: Handle, everywhere: Handle) -> None:
        if here.error is not None:
            everywhere.end(here.error)
            return
        said = self._host.start(Barrier())
        said.when_over(lambda: everywhere.end(said.error))

    def abort(self) -> Handle:
        """Abort both links. The returned handle is over once nothing is stuck on the device."""
        down = self.device.abort()
        self._host.abort()
        return down
