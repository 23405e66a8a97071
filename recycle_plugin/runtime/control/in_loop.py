"""Connections (runtime/control/connections.py) in an event loop: waiting for one does not block other tasks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from recycle_plugin.authentication.datagrams import SealedDatagrams
from recycle_plugin.authentication.handshake import Stranger
from recycle_plugin.core.messages.from_coordinator import Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.runtime.control.connections import ATTEMPT_S, ControlWay, connect
from recycle_plugin.runtime.control.framed import Control, Disconnected

AT_ONCE = 100  # messages that are read before they are asked for


class InLoop:
    """A connection in the running event loop."""

    @classmethod
    async def connect(cls, way: ControlWay, timeout_s: float) -> InLoop:
        """Connect as connections.connect does, in threads. If cancelled, at most one attempt (5 s) still runs."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return cls(await asyncio.to_thread(connect, way, ATTEMPT_S))
            except Stranger:
                raise
            except ConnectionError:
                if time.monotonic() >= deadline:
                    raise

    def __init__(self, control: Control) -> None:
        self._control, self._loop = control, asyncio.get_running_loop()
        self._waiting: asyncio.Future[Any] | None = None
        self._come: deque[object] = deque()  # messages that are not asked for yet
        self._more = True  # there may be messages that were not read
        self._take: Callable[[object], object] | None = None  # gets each message at once, see hear()
        self._came = False  # whether any has since the last look
        self._error: Exception | None = None  # what that call has raised
        self._later = False  # whether a flush waits for the end of this turn of the loop
        self._looked_at = -1  # the descriptor that the loop watches
        self.here, self.there = control.here, control.there

    @property
    def datagrams(self) -> SealedDatagrams | None:
        return self._control.datagrams

    @property
    def address(self) -> tuple[str, int] | None:
        return self._control.address

    @property
    def held_up(self) -> bool:
        return self._control.held_up

    @property
    def elsewhere(self) -> tuple[str, int] | None:
        return self._control.elsewhere

    @property
    def broken(self) -> Disconnected | None:
        """Why the connection is broken, None as long as a message may come."""
        return None if self._come else self._control.broken

    def send(self, message: object, more: bool = False) -> None:
        """Send a message, now or once the other end takes it. ``more``: send it with the next message, or at
        :meth:`flush_soon`.
        """
        if not self._control.send(message, more=more) and self._control.broken is None:
            self._loop.add_writer(self._control.fileno(), self._push)

    def hold_all(self) -> None:
        """Keep all that waits for the other end, however much it is."""
        self._control.hold_all()

    def flush_soon(self) -> None:
        """Send held-back messages at the end of this turn of the loop, together with all that it still sends."""
        if not self._later:
            self._later = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._later = False
        if self._control.broken is None and not self._control.push():
            self._loop.add_writer(self._control.fileno(), self._push)

    async def receive(self, timeout_s: float) -> object | None:
        """Return the next message; None if the connection is broken, or nothing comes within ``timeout_s`` seconds."""
        deadline = self._loop.time() + timeout_s
        if self._more and not self._come:
            self._read()
        while not self._come and self.broken is None and self._loop.time() < deadline:
            await self._readable(deadline)
        return self._come.popleft() if self._come else None

    async def hear(self, take: Callable[[object], object], timeout_s: float) -> None:
        """Call ``take`` with each message, in the loop itself: among thousands of connections, to wake a task for each
        message costs more than the message. Return once the connection is broken, or nothing has come for ``timeout_s``
        seconds. Raises what ``take`` raises.
        """
        self._take, self._came, self._error = take, True, None
        try:
            self._read()
            while self._came and self._error is None and self.broken is None:
                self._came = False
                await self._readable(self._loop.time() + timeout_s)
        finally:
            self._take = None
        if self._error is not None:
            raise self._error

    async def resume(self, hello: Hello, timeout_s: float) -> Welcome | None:
        """Connect again; see Control.resume."""
        self._leave()
        welcome = await asyncio.to_thread(self._control.resume, hello, timeout_s)
        self._more, self.there = True, self._control.there  # messages may have come with the answer
        return welcome

    def give_up_unless_heard(self, most: int) -> None:
        """Give the connection up (Control.give_up) if more than ``most`` messages are not confirmed."""
        self._control.give_up("nothing is heard from the coordinator", most + 1)

    def bear_silence(self, silent_s: float) -> None:
        """Break after this much silence of the other end's host; see Control.bear_silence."""
        self._control.bear_silence(silent_s)

    def close(self) -> None:
        """Close the connection, and wake the task that waits in it."""
        self._leave()
        self._come.clear()
        self._control.close()

    def _push(self) -> None:
        if self._control.push() or self._control.broken is not None:
            self._loop.remove_writer(self._control.fileno())

    async def _readable(self, deadline: float) -> None:
        """Return once something has come, or at the ``deadline``, by the loop's clock. The loop goes on watching the
        descriptor, which costs less than registering it before each wait.
        """
        if self._looked_at < 0:
            self._looked_at = self._control.fileno()
            self._loop.add_reader(self._looked_at, self._read)
        self._waiting = self._loop.create_future()
        late = self._loop.call_at(deadline, _wake, self._waiting)
        try:
            await self._waiting
        finally:
            late.cancel()

    def _read(self) -> None:
        """Read available bytes, at most AT_ONCE messages, and pass them on or wake the waiting task."""
        while len(self._come) < AT_ONCE and (message := self._control.receive()) is not None:
            self._come.append(message)
        self._more = len(self._come) >= AT_ONCE
        if self._control.broken is not None and self._looked_at >= 0:
            self._loop.remove_reader(self._looked_at)  # it stays readable
            self._looked_at = -1
        if self._take is not None:
            self._pass_on(self._take)
        if self._waiting is not None and (self._take is None or self._error is not None or self.broken is not None):
            _wake(self._waiting)

    def _pass_on(self, take: Callable[[object], object]) -> None:
        """Call ``take`` with each message that has come; it may close the connection."""
        self._came = self._came or bool(self._come)
        try:
            while self._come:
                take(self._come.popleft())
        except Exception as error:  # goes to the task that hears
            self._error, self._take = error, None
        else:
            if self._more and self.broken is None:  # the descriptor does not tell of what is read already
                self._loop.call_soon(self._read)

    def _leave(self) -> None:
        """Take the descriptor out of the loop, which must not watch a number that is released."""
        if self._looked_at >= 0:
            self._loop.remove_reader(self._looked_at)
            self._looked_at = -1
        if self._control.fileno() >= 0:
            self._loop.remove_writer(self._control.fileno())
        if self._waiting is not None:
            _wake(self._waiting)
            self._waiting = None


def _wake(waiting: asyncio.Future[Any]) -> None:
    if not waiting.done():
        waiting.set_result(None)
