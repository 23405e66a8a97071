"""The coordinator's entrance: it listens, and authenticates each process that connects in a task of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from recycle_plugin.authentication.door import Door
from recycle_plugin.runtime.control.connections import SocketControl
from recycle_plugin.runtime.system.accepting import Refusals

BACKLOG = 4096


class Entrance:
    """Listens at the address ``host`` from :meth:`open` on. ``answer`` gets each authenticated connection, ``warn`` a
    line for each failed accept. Raises OSError if the port is taken.
    """

    def __init__(
        self, host: str, port: int, door: Door, answer: Callable[[SocketControl], None], warn: Callable[[str], None]
    ) -> None:
        self._door, self.answer, self._refusals = door, answer, Refusals(warn)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
        except OSError:
            self._listener.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        """The (host, port) where it listens, with the real port if 0 was asked for."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def open(self) -> None:
        """Accept connections from now on. Raises OSError if the port is taken."""
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._begin(self._accept())

    async def close(self) -> None:
        """Stop accepting."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._listener.close()

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while pause_s := self._door.pause_s():
                await asyncio.sleep(pause_s)
            try:
                connection, peer = await loop.sock_accept(self._listener)
            except OSError as error:
                await asyncio.sleep(self._refusals.pause_s(error))
                continue
            self._door.comes(connection)
            self._begin(self._let_in(connection, peer))

    async def _let_in(self, connection: socket.socket, peer: tuple[Any, ...]) -> None:
        taken = False
        try:
            if (proved := await self._door.lets_in_loop(connection, peer)) is not None:
                self.answer(SocketControl(proved))
                taken = True
        except OSError:  # the caller has gone
            pass
        finally:
            if not taken:
                connection.close()
