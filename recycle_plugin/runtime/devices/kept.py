"""Tensors that stay on their device, and come to the host when somebody asks for that."""

from __future__ import annotations

import threading
from collections.abc import Callable

from recycle_plugin.runtime.devices.port import Copy, Tensors


class Kept:
    """A copy of ``tensors`` to the host, which ``begin`` starts when it is first asked for, in whatever thread.

    The tensors are contiguous and without a graph, and nobody changes them.
    """

    def __init__(self, tensors: Tensors, begin: Callable[[], Copy]) -> None:
        self.tensors, self._begin = tensors, begin
        self._lock = threading.Lock()
        self._copy: Copy | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def begin(self) -> Copy:
        """The copy, which is under way from now on."""
        with self._lock:
            if self._copy is None:
                self._copy = self._begin()
            return self._copy

    def poll(self) -> bool:
        """Whether it is over, well or badly."""
        return self.begin().poll()

    def wait(self, timeout_s: float) -> Tensors:
        """The tensors in host memory; raises the copy's error, or WaitTimeout past the deadline."""
        return self.begin().wait(timeout_s)
