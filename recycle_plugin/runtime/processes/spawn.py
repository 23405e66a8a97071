"""Starting the worker process: as a plain child, or as a fork of a warm server that has done the imports. The server,
whose Unix socket ``RECYCLE_FORK_SERVER`` names, saves each worker the seconds that importing torch takes.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from typing import Protocol

from recycle_plugin.core.messages.encoding import HEAD, Language
from recycle_plugin.core.vocabulary.describe import how_ended
from recycle_plugin.runtime.processes.variables import SERVER_VARIABLE

# how long a server may take to import its modules, and to compile the planner at a machine's first call
SERVER_S = 180.0
PR_SET_PDEATHSIG = 1
STOP_S = 10.0  # how long a server may take to end
STOPPED = 0  # a server's exit code if it ends since its line is closed, and only then


class Process(Protocol):
    """A started worker process."""

    pid: int

    async def wait(self) -> int:
        """Wait for the process's end. Return its exit code, negative for a signal."""

    def send_signal(self, number: int) -> None:
        """Send the process a signal; raises ProcessLookupError if it is gone."""


@dataclass(frozen=True)
class Request:
    """A request to run ``module`` with ``arguments`` in ``folder``."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str


LANGUAGE = Language((Request,))


class NoServer(RuntimeError):
    """There is no process to fork workers from; the message says why."""


async def spawn(module: str, arguments: list[str], environment: dict[str, str]) -> Process:
    """Start ``python -m module arguments``. Raises ConnectionError if a server should fork it and can't."""
    server = environment.get(SERVER_VARIABLE)
    if server:
        return await ForkedProcess.start(server, module, arguments, environment)
    return await asyncio.create_subprocess_exec(sys.executable, "-u", "-m", module, *arguments, env=environment)


class ForkedProcess:
    """A worker forked by the server, which reports when and how it ended."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer  # when it closes, the server kills the worker

    @classmethod
    async def start(cls, server: str, module: str, arguments: list[str], environment: dict[str, str]) -> ForkedProcess:
        """Have ``server`` fork a process; raises ConnectionError if it does not."""
        connection = ask(server, Request(module, tuple(arguments), environment, os.getcwd()), [1, 2])
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        return cls(forked_pid(module, await reader.readline()), reader, writer)

    async def wait(self) -> int:
        """Wait for its end. Return its exit code, negative for a signal; -SIGKILL if the server itself is gone."""
        line = await self._reader.readline()
        self._writer.close()
        return int(line) if line else -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        """Send the process a signal; raises ProcessLookupError if it is gone."""
        os.kill(self.pid, number)


def ask(server: str, request: Request, descriptors: list[int]) -> socket.socket:
    """Ask the server for a fork with these descriptors as standard output and standard error. The socket then brings a
    line with the process id, and one with the exit code. Raises ConnectionError.
    """
    frame = LANGUAGE.encode(request)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(server.replace("@", "\0", 1) if server.startswith("@") else server)
        if (user := user_of(connection)) != os.getuid():  # another user may have taken the name after the server's end
            raise PermissionError(errno.EPERM, f"it is user {user}'s")
        connection.sendmsg(
            [frame[: HEAD.size]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        )
        connection.sendall(frame[HEAD.size :])
    except OSError as error:
        connection.close()
        raise ConnectionError(
            f"{request.module} was not started: the process that it is to be forked from can't be reached "
            f"({error.strerror}); unset {SERVER_VARIABLE} if it names an earlier one"
        ) from error
    return connection


def user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket, as the kernel reports it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


def forked_pid(module: str, answer: bytes) -> int:
    """Return the process id from the server's first answer; raises ConnectionError for any other answer."""
    said = answer.decode().strip()
    if not said.isdecimal():
        raise ConnectionError(
            f"{module} was not started: {said or 'the process that it is to be forked from has gone'}"
        )
    return int(said)


def socket_name(listener: socket.socket) -> str:
    """Return the address of a server's socket for :func:`ask`: its path, or @ and a name if it has no file."""
    name = listener.getsockname()
    return name if isinstance(name, str) else "@" + name[1:].decode()


class ServerProcess:
    """A fork server (fork_server.py) of this process: the server ends with this process, and shares its output."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, line: int) -> None:
        self._process, self._line = process, line
        self.address = address

    @classmethod
    async def start(cls, modules: list[str], timeout_s: float = SERVER_S) -> ServerProcess:
        """Start a server; return once it has imported ``modules``. Raises NoServer if not within ``timeout_s``."""
        theirs, line = os.pipe()
        command = [sys.executable, "-u", "-m", "recycle_plugin.runtime.processes.fork_server"]
        process = await asyncio.create_subprocess_exec(
            *command, f"@{theirs}", *modules, stdout=subprocess.PIPE, pass_fds=(theirs,)
        )
        os.close(theirs)
        try:
            assert process.stdout is not None, "it has a pipe"
            said = await asyncio.wait_for(process.stdout.readline(), timeout_s)
            how, _, what = said.decode().strip().partition(" ")
            if how != "ready":
                raise NoServer(
                    f"in the process to fork them from {what}"
                    if how
                    else f"the process to fork them from {how_ended(await process.wait())} before it had imported "
                    f"{', '.join(modules)}"
                )
        except BaseException as error:
            os.close(line)
            if process.returncode is None:
                process.kill()
            await process.wait()
            if isinstance(error, asyncio.TimeoutError):
                raise NoServer(
                    f"the process to fork them from has not imported {', '.join(modules)} within {timeout_s:g} s"
                ) from None
            raise
        return cls(process, what, line)

    async def stop(self) -> str:
        """End the server and all that it has forked. Return how it had ended before, or "" if it had not."""
        os.close(self._line)
        try:
            code = await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:  # it was stopped
            self._process.kill()
            code = await self._process.wait()
        return "" if code == STOPPED else how_ended(code)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends; end it at once if ``parent`` is no longer its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
