"""The logs of a host, which its supervisors serve to workers that replay a stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recycle_plugin.authentication.secret import SecretFile
from recycle_plugin.core.messages.from_workers import LogFolder, LogsServed, StrangersAtLogs
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.processes.log_server import LogServer
from recycle_plugin.runtime.system.console import say


class ServedLogs:
    """Serves the logs of ``rank``'s host; ``tell`` gets the messages for the coordinator."""

    def __init__(self, rank: int, job_id: str, secret: SecretFile, tell: Callable[[object], None]) -> None:
        self._rank, self._job_id, self._secret, self._tell = rank, job_id, secret, tell
        self._folders: asyncio.Queue[LogFolder] = asyncio.Queue()  # to serve; the last one counts

    def serve(self, folder: LogFolder) -> None:
        """Serve ``folder`` from now on."""
        self._folders.put_nowait(folder)

    async def run(self) -> None:
        """Serve the logs in the last folder given, until cancelled. Threads serve them: a slow disk then blocks nothing
        else. They are started from a thread in which signals are blocked.
        """
        server: LogServer | None = None
        loop = asyncio.get_running_loop()

        def say_stranger(*said: Any) -> None:
            loop.call_soon_threadsafe(self._tell, StrangersAtLogs(self._rank, *said))

        def warn(text: str) -> None:
            say(f"warning: {text}")

        try:
            while True:
                folder = await self._folders.get()
                if server is not None and server.token != folder.token:
                    server.close()
                    server = None
                try:
                    if server is None:
                        place = Path(folder.path), self._job_id, folder.token, folder.host
                        server = await asyncio.to_thread(LogServer, *place, self._secret.read(), warn, say_stranger)
                except (RecycleError, RuntimeError) as error:  # the second without room for a thread
                    warn(f"other workers can't fetch the logs of rank {self._rank} in {folder.path}: {error}")
                else:
                    self._tell(LogsServed(self._rank, server.token, server.address))
        finally:
            if server is not None:
                server.close()
