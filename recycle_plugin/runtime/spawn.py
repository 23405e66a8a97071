"""Starting the worker process: a plain child, or a fork of a warm server that has the imports done.

The server (``RECYCLE_FORK_SERVER`` names its Unix socket) saves the seconds that importing torch,
DeepSpeed and megatron-core takes; the tests use one for all their jobs.
"""

from __future__ import annotations

import asyncio
import array
import json
import os
import signal
import socket
import sys
from typing import Protocol

SERVER_VARIABLE = "RECYCLE_FORK_SERVER"


class Process(Protocol):
    """A started worker."""

    pid: int

    async def wait(self) -> int:
        """Its exit code; negative for a signal."""

    def send_signal(self, number: int) -> None: ...


async def spawn(module: str, arguments: list[str], environment: dict[str, str], keep_fd: int | None = None) -> Process:
    """Start ``python -m module arguments``.  ``keep_fd``: an open descriptor that it inherits under the same number."""
    server = environment.get(SERVER_VARIABLE)
    if server:
        return await ForkedProcess.start(server, module, arguments, environment, keep_fd)
    keep = () if keep_fd is None else (keep_fd,)
    return await asyncio.create_subprocess_exec(sys.executable, "-u", "-m", module, *arguments, env=environment, pass_fds=keep)


class ForkedProcess:
    """A worker forked by the server, which tells when and how it ended."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer  # closing it makes the server kill the worker

    @classmethod
    async def start(cls, server: str, module: str, arguments: list[str], environment: dict[str, str], keep_fd: int | None = None) -> ForkedProcess:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(server)
        request = json.dumps(
            {"module": module, "arguments": arguments, "environment": environment, "folder": os.getcwd(), "keep_fd": keep_fd}
        ).encode()
        streams = array.array("i", [1, 2] if keep_fd is None else [1, 2, keep_fd])
        connection.sendmsg([len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        connection.sendall(request)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        return cls(int(await reader.readline()), reader, writer)

    async def wait(self) -> int:
        line = await self._reader.readline()
        self._writer.close()
        return int(line) if line else -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)
