"""Host memory that can't be swapped out: the only kind that a device copies from and to while the host goes on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

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
        self._short: Callable[[int], None] | None = None

    def limit(self, budget: int, short: Callable[[int], None]) -> None:
        """Pin at most ``budget`` bytes from now on; ``short`` is called once, with the size of what has no room."""
        self.budget, self._short = budget, short

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor in host memory, pinned within the budget."""
        size = torch.Size(shape).numel() * dtype.itemsize
        with self._lock:
            pinned = 0 < size <= self.budget - self.used
            self.used += size * pinned
            short, self._short = (None, self._short) if pinned or not size else (self._short, None)
        if short is not None:
            short(size)
        made = torch.empty(shape, dtype=dtype, device=HOST, pin_memory=pinned)
        if pinned:  # the storage lives as long as any view of it, also one in a graph
            weakref.finalize(made.untyped_storage(), self._free, size)
        return made

    def _free(self, size: int) -> None:
        with self._lock:
            self.used -= size
