"""Connections (runtime/control/connections.py) in an event loop, where waiting for one lets all other tasks go on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from recycle_plugin.authentication.datagrams import SealedDatagrams
from recycle_plugin.authentication.handshake import Stranger
from recycle_plugin.runtime.control.connections import ATTEMPT_S, Control, ControlWay, Disconnected, connect


class InLoop:
    """A connection in the running event loop: waiting for it lets all other tasks go on."""

    @classmethod
    async def connect(cls, way: ControlWay, timeout_s: float) -> InLoop:
        """Connect as runtime.control.connections.connect does, in threads of one attempt each.

        A caller that gives up waits for no more than one attempt, 5 s.
        """
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
        self.there = control.there

    @property
    def datagrams(self) -> SealedDatagrams | None:
        """See Control."""
        return self._control.datagrams

    @property
    def broken(self) -> Disconnected | None:
        """Why the connection is broken, None as long as something may come."""
        return self._control.broken

    def send(self, message: object) -> None:
        """Send a message; what the other end does not take now goes out once it does."""
        if not self._control.send(message) and self.broken is None:
            self._loop.add_writer(self._control.fileno(), self._push)

    async def receive(self, timeout_s: float) -> object | None:
        """The next message; None where the connection is broken, or nothing has come within ``timeout_s`` seconds."""
        deadline = self._loop.time() + timeout_s
        while (message := self._control.receive()) is None and self.broken is None and self._loop.time() < deadline:
            await self._readable(deadline)
        return message

    async def resume(self, hello: object, timeout_s: float) -> bool:
        """Make the connection again, and say whether it stands; see Control.resume."""
        self._leave()
        return await asyncio.to_thread(self._control.resume, hello, timeout_s)

    def close(self) -> None:
        """Close the connection, and wake the task that waits in it."""
        self._leave()
        self._control.close()

    def _push(self) -> None:
        if self._control.push() or self.broken is not None:
            self._loop.remove_writer(self._control.fileno())

    async def _readable(self, deadline: float) -> None:
        self._waiting = waiting = self._loop.create_future()
        number, late = self._control.fileno(), self._loop.call_at(deadline, _wake, waiting)
        self._loop.add_reader(number, _wake, waiting)
        try:
            await waiting
        finally:
            late.cancel()
            if self._waiting is waiting:  # else the number may be another's by now
                self._loop.remove_reader(number)

    def _leave(self) -> None:
        """Take the descriptor out of the loop, which must not look at a number that is given back."""
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._loop.remove_writer(self._control.fileno())
        if self._waiting is not None:
            _wake(self._waiting)
            self._waiting = None


def _wake(waiting: asyncio.Future[Any]) -> None:
    if not waiting.done():
        waiting.set_result(None)
