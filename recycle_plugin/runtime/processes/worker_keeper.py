"""Who keeps a supervisor's worker: the guard, which started both and outlives the supervisor, or its own process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from recycle_plugin.runtime.processes import signal_senders as senders
from recycle_plugin.runtime.processes.spawn import Process, spawn


class WorkerKeeper(Protocol):
    """Keeps the worker of a supervisor, and knows whether its guard is still there.

    ``rank`` and ``worker`` are those of a supervisor that was here before, None if there was none; ``pid`` is the
    process that holds the rank's place in the job.
    """

    pid: int

    @property
    def rank(self) -> int | None:
        """The rank that the last supervisor's worker had, None if there was none."""

    @property
    def worker(self) -> Process | None:
        """The worker that the last supervisor has started, None if there was none."""

    async def start(self, rank: int, module: str, arguments: list[str], environment: dict[str, str]) -> Process:
        """Start the worker, as runtime/processes/spawn.py does; ``rank`` is kept for the next supervisor.  Raises
        ConnectionError.
        """

    async def watch(self, told_to_end: Callable[[str], None]) -> None:
        """Return when the guard is gone, and the worker with it.

        ``told_to_end`` is called with each signal that is to end the job, and its sender where that is known.
        """


class Here:
    """Keeps the worker in the supervisor's own process, without a guard; signals there are not for one supervisor."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.worker: Process | None = None
        self.pid = os.getpid()

    async def start(self, rank: int, module: str, arguments: list[str], environment: dict[str, str]) -> Process:
        """Start the worker, as runtime/processes/spawn.py does."""
        return await spawn(module, arguments, environment)

    async def watch(self, told_to_end: Callable[[str], None]) -> None:
        """Wait for ever: there is no guard that could go."""
        await asyncio.get_running_loop().create_future()


class Guarded:
    """Keeps the worker at its guard, over the connection to it; runtime/processes/guard.py has the messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: dict) -> None:
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in one"
        self._supervising = task
        self._started: asyncio.Future[int] = self._loop.create_future()
        self._told_to_end: Callable[[str], None] | None = None
        self._signals = [held["signal"]] if held["signal"] else []
        self.rank = held["rank"]
        self.pid = held["guard"]
        self.worker: GuardedProcess | None = None
        self._code: asyncio.Future[int] = self._loop.create_future()  # of the worker, whenever it is started
        if held["pid"] is not None:
            self.worker = GuardedProcess(held["pid"], self._code, self._tell)
        if held["code"] is not None:
            self._code.set_result(held["code"])
        senders.take(self._signalled)
        self._hearing = asyncio.create_task(self._hear())

    @classmethod
    async def take(cls, line: socket.socket) -> Guarded | None:
        """Take the place over from the guard, at this end of the connection to it; None where it wants no supervisor
        any more.
        """
        reader, writer = await asyncio.open_connection(sock=line)
        while (said := await reader.readline()) and "held" not in (message := json.loads(said)):
            pass  # what it holds has the signals that have come before
        return cls(reader, writer, message["held"]) if said else None

    async def start(self, rank: int, module: str, arguments: list[str], environment: dict[str, str]) -> Process:
        """Have the guard start the worker; raises ConnectionError where it does not."""
        self._tell(start=[module, *arguments], rank=rank, environment=environment)
        self.worker = GuardedProcess(await self._started, self._code, self._tell)
        return self.worker

    def _tell(self, **message: object) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def watch(self, told_to_end: Callable[[str], None]) -> None:
        """Return when the guard is gone; ``told_to_end`` is called with the first signal that the guard, or this
        process, gets.
        """
        self._told_to_end = told_to_end
        for what in self._signals[:1]:
            told_to_end(what)
        await asyncio.shield(self._hearing)

    def _signalled(self, what: str) -> None:
        """Take note of a signal, the guard's or this process's, which mostly come together.

        Before there is a worker nobody has anything to lose, and the supervisor just ends.
        """
        self._signals.append(what)
        if self.worker is None:
            self._supervising.cancel()
        if self._told_to_end is not None and len(self._signals) == 1:
            self._told_to_end(what)

    async def _hear(self) -> None:
        """Take the guard's messages until it is gone, and the worker with it."""
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
            self._started.set_exception(
                ConnectionError("the worker was not started: the process that the launcher has started for it is gone")
            )
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
        """Wait for its end, which the guard tells; the exit code, negative for a signal."""
        return await asyncio.shield(self._code)

    def send_signal(self, number: int) -> None:
        """Have the guard send it a signal."""
        self._tell(kill=number)
