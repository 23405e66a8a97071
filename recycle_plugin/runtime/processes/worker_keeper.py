"""Keepers of a supervisor's worker: the guard, which started both and outlives the supervisor, or its own process.

``pid``: the process that holds the rank's place in the job. The rest is what an earlier supervisor here has left, if
there was one: the ``rank`` and ``incarnation`` of the worker that it started or was to start, the ``worker``'s process,
and the ``coordinator``'s address if it has moved since the start.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from recycle_plugin.runtime.processes import signal_senders as senders
from recycle_plugin.runtime.processes.spawn import Process, spawn

GUARD_GONE = "the worker was not started: the process that the launcher has started for it is gone"


class Here:
    """Keeps the worker in the supervisor's own process, without a guard. Signals there are not for one supervisor."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.incarnation = 0
        self.worker: Process | None = None
        self.pid = os.getpid()
        self.coordinator: tuple[str, int] | None = None

    def follow(self, coordinator: tuple[str, int]) -> None:
        """Do nothing: no other supervisor has to know the coordinator's present address."""

    def stand_by(self, coordinator: tuple[str, int]) -> None:
        """Do nothing: this is the coordinator's own process."""

    def next(self, rank: int, incarnation: int) -> None:
        """Do nothing: no other supervisor follows."""

    async def start(self, module: str, arguments: list[str], environment: dict[str, str]) -> Process:
        """Start the worker as runtime/processes/spawn.py does."""
        return await spawn(module, arguments, environment)

    def on_signal(self, told_to_end: Callable[[str], None]) -> None:
        """Do nothing: signals are for the process, which has other supervisors too."""

    async def gone(self) -> None:
        """Wait for ever: there is no guard."""
        await asyncio.get_running_loop().create_future()


class Guarded:
    """Keeps the worker at its guard, over the connection to it; runtime/processes/guard.py lists the messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: dict[Any, Any]) -> None:
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in one"
        self._supervising = task
        self._started: asyncio.Future[int] = self._loop.create_future()
        self._told_to_end: Callable[[str], None] | None = None
        self._signals = [held["signal"]] if held["signal"] else []
        self.rank = held["rank"]
        self.incarnation = held["incarnation"]
        self.pid = held["guard"]
        self.coordinator = (str(held["coordinator"][0]), int(held["coordinator"][1])) if held["coordinator"] else None
        self.worker: GuardedProcess | None = None
        self._code: asyncio.Future[int] = self._loop.create_future()  # of the last worker
        if held["pid"] is not None:
            self.worker = GuardedProcess(held["pid"], self._code, self._tell)
        if held["code"] is not None:
            self._code.set_result(held["code"])
        senders.take(self._signalled, lambda number: self._tell(got=number))
        self._hearing = asyncio.create_task(self._hear())

    @classmethod
    async def take(cls, line: socket.socket) -> Guarded | None:
        """Take the place over from the guard at the other end of ``line``; None if it wants no supervisor any more."""
        reader, writer = await asyncio.open_connection(sock=line)
        while (said := await reader.readline()) and "held" not in (message := json.loads(said)):
            pass  # messages before it: signals, which it has too
        return cls(reader, writer, message["held"]) if said else None

    def next(self, rank: int, incarnation: int) -> None:
        """Have the guard keep, for the next supervisor, which process this one starts; the worker before has ended."""
        self._tell(rank=rank, incarnation=incarnation)

    def follow(self, coordinator: tuple[str, int]) -> None:
        """Have the guard keep the coordinator's present address for the next supervisor."""
        self._tell(coordinator=coordinator)

    def stand_by(self, coordinator: tuple[str, int]) -> None:
        """Have the guard start a standby for the coordinator at this address if none runs."""
        self._tell(stand_by=coordinator)

    async def start(self, module: str, arguments: list[str], environment: dict[str, str]) -> Process:
        """Have the guard start the worker; raises ConnectionError if that fails."""
        if self._hearing.done():
            raise ConnectionError(GUARD_GONE)
        self._started, self._code = self._loop.create_future(), self._loop.create_future()
        self._tell(start=[module, *arguments], environment=environment)
        self.worker = GuardedProcess(await self._started, self._code, self._tell)
        return self.worker

    def _tell(self, **message: object) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def on_signal(self, told_to_end: Callable[[str], None]) -> None:
        """Call ``told_to_end`` with the first signal that the guard or this process gets or has got."""
        self._told_to_end = told_to_end
        for what in self._signals[:1]:
            told_to_end(what)

    async def gone(self) -> None:
        """Return when the guard is gone, and the worker with it."""
        await asyncio.shield(self._hearing)

    def _signalled(self, what: str) -> None:
        """Handle a signal to the guard or this process, which mostly come together. Before there is a worker, nothing
        can be lost, and the supervisor just ends.
        """
        self._signals.append(what)
        if self.worker is None and self._told_to_end is None:
            self._supervising.cancel()
        if self._told_to_end is not None and len(self._signals) == 1:
            self._told_to_end(what)

    async def _hear(self) -> None:
        """Handle the guard's messages until it is gone, and the worker with it."""
        while said := await self._reader.readline():
            message = json.loads(said)
            if "pid" in message:
                self._started.set_result(message["pid"])
            if "failed" in message:
                self._started.set_exception(ConnectionError(message["failed"]))
            if "code" in message:
                self._code.set_result(message["code"])
            if "signal" in message:
                self._signalled(message["signal"])
        if not self._started.done():
            self._started.set_exception(ConnectionError(GUARD_GONE))
            self._started.exception()  # retrieved, in case no task waits for it
        if self.worker is not None and not self._code.done():
            with suppress(ProcessLookupError):
                os.kill(self.worker.pid, signal.SIGKILL)


class GuardedProcess:
    """A worker process whose parent is the guard."""

    def __init__(self, pid: int, code: asyncio.Future[int], tell: Callable[..., None]) -> None:
        self.pid = pid
        self._code = code
        self._tell = tell

    async def wait(self) -> int:
        """Wait for the process's end. Return its exit code, negative for a signal."""
        return await asyncio.shield(self._code)

    def send_signal(self, number: int) -> None:
        """Have the guard send it a signal."""
        self._tell(kill=number)
