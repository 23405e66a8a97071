"""Host memory that cannot be swapped out: only with it does a device copy while the host goes on."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from recycle_plugin.runtime.devices.host import HOST

BUDGET = 4 << 30  # bytes, before a job sets its own


class PinnedMemory:
    """Pinned host memory of at most ``budget`` bytes at a time, by torch's sizes, which are powers of two.

    torch keeps freed blocks for reuse, and never hands out a block that a copy still uses. Pinned memory is taken from
    the whole machine, hence the budget. Past it memory is ordinary: copies then block the host, but nothing fails.
    """

    def __init__(self) -> None:
        self.budget, self._taken = BUDGET, 0
        self._lock = threading.Lock()
        self._short: Callable[[int], None] | None = None
        self._numbers = itertools.count()
        # no weakref.finalize: at exit the process walks all of those, and fails if other threads free one then
        self._live: dict[int, weakref.ref[Any]] = {}
        self._freed: deque[int] = deque()  # sizes; memory may be freed at any line of any thread, also in room()

    def limit(self, budget: int, short: Callable[[int], None]) -> None:
        """Pin at most ``budget`` bytes from now on; ``short`` is called once, with the first size that has no room."""
        self.budget, self._short = budget, short

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor in host memory, pinned within the budget."""
        size = taken(torch.Size(shape).numel() * dtype.itemsize)
        with self._lock:
            pinned = 0 < size <= self.budget - self._settled()
            self._taken += size * pinned
        made = self._pinned(shape, dtype, size) if pinned else None
        if made is None and size:
            with self._lock:
                short, self._short = self._short, None
            if short is not None:
                short(size)
        return torch.empty(shape, dtype=dtype, device=HOST) if made is None else made

    def _pinned(self, shape: Sequence[int], dtype: torch.dtype, size: int) -> torch.Tensor | None:
        """Return pinned memory; None if the machine refuses, whatever the budget, for example in a container. The
        present amount is the budget then.
        """
        try:
            made = torch.empty(shape, dtype=dtype, device=HOST, pin_memory=True)
        except RuntimeError:  # of the device; if the device itself has failed, its next call says so
            with self._lock:
                self._taken -= size
                self.budget = min(self.budget, self._settled())
            return None
        number = next(self._numbers)
        # the storage lives as long as any view of it, also one in a graph
        self._live[number] = weakref.ref(made.untyped_storage(), partial(self._free, number, size))
        return made

    @property
    def used(self) -> int:
        with self._lock:
            return self._settled()

    def _settled(self) -> int:
        while self._freed:
            self._taken -= self._freed.popleft()
        return self._taken

    def _free(self, number: int, size: int, _: object) -> None:
        del self._live[number]
        self._freed.append(size)


def taken(size: int) -> int:
    """Return the bytes that torch pins for ``size`` bytes: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0
