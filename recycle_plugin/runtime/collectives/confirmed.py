"""A link on an accelerator, of whose operations each counts once all members have seen it over.

An aborted kernel leaves its waits and goes on: it passes garbage to its neighbours, with the flags that say that data
has come (NVIDIA/nccl, src/device/prims_ll.h, readLL and storeLL).  So a member that hears of a loss early ends the
kernels of one that hears of it late, well and with garbage, and that one's host can't tell.  Right is what was over
everywhere before anybody aborted.  Therefore each member says, by a barrier in host memory behind each operation, that
it has seen the end while its link had none; whoever aborts first never comes to that barrier, and the dead do not
either.
"""

from __future__ import annotations

from collections.abc import Callable

from recycle_plugin.runtime.collectives.link import Barrier, Handle, Link, Operation, unheard


class ConfirmedLink:
    """The link ``device``, whose handles end in the order of the calls, confirmed over ``host``, of the same members.

    Neither is used by anybody else.
    """

    def __init__(self, device: Link, host: Link) -> None:
        self.generation = device.generation
        self.device, self._host = device, host

    @property
    def connected(self) -> bool:
        """Whether the connections to all members stand, of both kinds."""
        return self.device.connected and self._host.connected

    def connect(self) -> Handle:
        """Start connecting both; the handle is the device's, and names whoever has not come."""
        self._host.connect()
        return self.device.connect()

    def start(self, operation: Operation, launched: Callable[[], object] = unheard) -> Handle:
        """Begin ``operation`` on the device; its handle succeeds once all members have seen it over."""
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
        """Break both; the handle is over once nothing is stuck on the device."""
        down = self.device.abort()
        self._host.abort()
        return down
