"""Host memory that can't be swapped out: the only kind that a device copies from and to while the host goes on."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from recycle_plugin.runtime.devices.host import HOST

BUDGET = 4 << 30  # bytes, before a job has said how many


class PinnedMemory:
    """Pinned host memory of at most ``budget`` bytes at a time.

    torch keeps what was freed for the next who asks, and gives nobody a block that a copy still reads or writes.  What
    is pinned is taken from the whole machine, so there is a budget; past it memory is of the ordinary kind, to and from
    which copies keep the host waiting, and nothing fails.
    """

    def __init__(self) -> None:
        self.budget, self.used = BUDGET, 0
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._live: dict[int, weakref.ref] = {}  # no weakref.finalize: the process's end goes through all of those,
        # and fails where other threads free one meanwhile

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor in host memory, pinned within the budget."""
        size = torch.Size(shape).numel() * dtype.itemsize
        with self._lock:
            pinned = 0 < size <= self.budget - self.used
            self.used += size * pinned
        made = torch.empty(shape, dtype=dtype, device=HOST, pin_memory=pinned)
        if pinned:  # the storage lives as long as any view of it, also one in a graph
            number = next(self._numbers)
            self._live[number] = weakref.ref(made.untyped_storage(), partial(self._free, number, size))
        return made

    def _free(self, number: int, size: int, _: object) -> None:
        del self._live[number]
        with self._lock:
            self.used -= size
