"""A device whose copies and events are late: a thread sees to one when somebody waits for it, or when the test says so.

Until then its tensors are garbage.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from recycle_plugin.runtime.collectives.link import Handle
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.devices.port import Copy, Tensors


class Asked(NamedTuple):
    """A copy to the host or from it, and what of."""

    to: str
    what: str
    shared: bool


class LateDevice:
    """As runtime.devices.port.Device, in memory of the host.

    ``held``: nothing happens before :meth:`let`, however long somebody waits.  ``breaks``: with what everything fails
    that comes about from then on.

    ``asked``: all copies so far; ``under_way``: what is not over.
    """

    where, kind, generators, lags = CPU.where, CPU.kind, CPU.generators, True
    room, memory, arithmetic, budget, repeatable = CPU.room, CPU.memory, CPU.arithmetic, CPU.budget, CPU.repeatable
    order = CPU.order

    def __init__(self, held: bool = False) -> None:
        self.held, self.breaks = held, None
        self.asked: list[Asked] = []
        self.under_way: list[Late] = []

    def to_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool, apart: bool = False) -> Copy:
        return self._copy("host", tensors, what, shared)

    def from_host(self, tensors: Sequence[torch.Tensor], what: object, *, shared: bool) -> Copy:
        return self._copy("device", tensors, what, shared)

    def event(self, what: object) -> Late:
        return self._begin(Late(self, str(what), ()))

    def let(self) -> None:
        for late in list(self.under_way):
            late.come()

    def _copy(self, to: str, tensors: Sequence[torch.Tensor], what: object, shared: bool) -> Late:
        self.asked.append(Asked(to, str(what), shared))
        return self._begin(
            Late(
                self,
                f"{what}, to the {to}",
                [tensor.detach() if shared else tensor.detach().clone() for tensor in tensors],
            )
        )

    def _begin(self, late: Late) -> Late:
        self.under_way.append(late)
        return late


class Late:
    """Copies of ``sources``, as they are when they come about, or an event."""

    def __init__(self, device: LateDevice, what: str, sources: Sequence[torch.Tensor]) -> None:
        self._device, self._sources, self._handle = device, sources, Handle(what)
        self._targets: Tensors = tuple(map(garbage, sources))
        self.nbytes = sum(target.nbytes for target in self._targets)
        self._once, self._begun = threading.Lock(), False

    def poll(self) -> bool:
        return self._handle.poll()

    def wait(self, timeout_s: float) -> Tensors:
        if not self._device.held:
            self.come()
        self._handle.wait(timeout_s)
        return self._targets

    def since(self, earlier: Late) -> float:
        return self._at - earlier._at

    def come(self) -> None:
        with self._once:
            begun, self._begun = self._begun, True
        if not begun:
            threading.Thread(target=self._come, daemon=True).start()

    def _come(self) -> None:
        if self._device.breaks is None:
            for target, source in zip(self._targets, self._sources):
                target.copy_(source)
        self._at = time.perf_counter()
        self._device.under_way.remove(self)
        self._handle.end(self._device.breaks)


def garbage(like: torch.Tensor) -> torch.Tensor:
    made = torch.empty(like.shape, dtype=like.dtype)
    made.fill_(True) if made.dtype is torch.bool else made.reshape(-1).view(torch.uint8).fill_(0xFF)
    return made
