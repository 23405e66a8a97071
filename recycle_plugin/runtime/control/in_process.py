"""Control messages between two threads or tasks of one process."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from recycle_plugin.core.messages.encoding import LIMIT
from recycle_plugin.core.messages.from_coordinator import Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.runtime.control.framed import Framed


class _Wire:
    """An unbounded stream of bytes, one way. ``fd`` is readable while bytes wait, and at the end."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._pieces: deque[bytes] = deque()
        self._ended = False

    def put(self, data: bytes) -> None:
        with self._lock:
            if self._ended:
                raise BrokenPipeError
            self._pieces.append(data)
            os.eventfd_write(self.fd, 1)

    def get(self) -> bytes:
        with self._lock:
            if not self._pieces and not self._ended:
                raise BlockingIOError
            piece = self._pieces.popleft() if self._pieces else b""
            if not self._pieces and not self._ended:
                os.eventfd_read(self.fd)
            return piece

    def end(self) -> None:
        with self._lock:
            if not self._ended:
                self._ended = True
                os.eventfd_write(self.fd, 1)

    def release(self) -> None:
        self.end()
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


class InProcess(Framed):
    """A connection within one process. ``answer`` gets the other end at each (re)connection; there it is None."""

    here = "127.0.0.1"
    held_up = False
    there: tuple[str, int] | None = None
    address: tuple[str, int] | None = None

    def __init__(
        self, answer: Callable[[InProcess], object] | None, limit: int = LIMIT, wires: tuple[_Wire, _Wire] | None = None
    ) -> None:
        self._answer = answer
        super().__init__(limit)
        self._in, self._out = wires or self._called()

    def _called(self) -> tuple[_Wire, _Wire]:
        assert self._answer is not None, "this is the end that was called"
        wires = _Wire(), _Wire()
        self._answer(InProcess(None, self._limit, wires[::-1]))
        return wires

    def resume(self, hello: Hello, timeout_s: float) -> Welcome | None:
        """Hand a new other end to ``answer``; see Control.resume."""
        if self._answer is None:
            return None
        self.close()
        fresh = InProcess(self._answer, self._limit)
        fresh.send(self._again(hello))
        welcome = fresh.receive(timeout_s)
        if not isinstance(welcome, Welcome):
            fresh.close()
            return None
        with self._sending, self._receiving:
            self._in, self._out = fresh._in, fresh._out
            self._go_on(fresh, welcome)
        return welcome

    def fileno(self) -> int:
        """Return an eventfd that is readable while bytes wait."""
        return self._in.fd

    def _write(self, data: bytearray) -> int:
        self._out.put(bytes(data))
        return len(data)

    def _read(self) -> bytes:
        return self._in.get()

    def _shut(self) -> None:
        self._out.end()
        self._in.end()

    def _release(self) -> None:
        self._in.release()
