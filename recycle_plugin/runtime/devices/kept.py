"""Tensors that stay on their device, and are copied to the host on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable

from recycle_plugin.runtime.devices.port import Copy, Tensors


class Kept:
    """A copy of ``tensors`` to the host; ``begin`` starts it at the first demand, in any thread. The tensors are
    contiguous and without a graph, and nobody changes them.
    """

    def __init__(self, tensors: Tensors, begin: Callable[[], Copy]) -> None:
        self.tensors, self._begin = tensors, begin
        self._lock = threading.Lock()
        self._copy: Copy | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def begin(self) -> Copy:
        """Start the copy if it has not been started, and return it."""
        with self._lock:
            if self._copy is None:
                self._copy = self._begin()
            return self._copy

    def poll(self) -> bool:
        return self.begin().poll()

    def wait(self, timeout_s: float) -> Tensors:
        """Return the tensors in host memory; raises the copy's error, or WaitTimeout past the deadline."""
        return self.begin().wait(timeout_s)
