"""A supervisor's server for the log of its host: it serves the segments in its worker's folder, also after the worker's
death.

Every supervisor has one, since any may be the last on its host. A reader asks one of those that serve a folder, and the
next if that one is gone. Only segments of this run, by the head in the file, and only files with a segment's name are
served: no other file can be reached. Threads do all the work, so a slow disk blocks nothing else.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from recycle_plugin.authentication.door import Door, Say
from recycle_plugin.authentication.handshake import Port, Proved
from recycle_plugin.authentication.secret import Secret
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.lines.frames import Nonsense
from recycle_plugin.runtime.lines.listener import Listener
from recycle_plugin.runtime.log import served
from recycle_plugin.runtime.log.segment import Damaged, files, head
from recycle_plugin.runtime.log.served import (
    LONGEST_QUESTION,
    PIECE_BYTES,
    Ask,
    Listed,
    Listing,
    LogLine,
    Piece,
    Refusal,
    Want,
)

HELLO_S = 10.0  # how long a new connection may take to send its request
IDLE_S = 60.0  # how long a connection may be idle
MOST = 256  # connections at a time


class LogServer:
    """Serves the segments of ``run`` in ``folder``, which has this ``token``, at a free port of ``host``. ``secret``:
    the job's. ``say`` gets a line on the first malformed request, and ``stranger`` what a Door reports. Raises
    RecycleError if the folder is another one or the port can't be opened.
    """

    def __init__(
        self, folder: Path, run: str, token: str, host: str, secret: Secret, say: Callable[[str], None], stranger: Say
    ) -> None:
        if not folder.is_dir() or served.token_of(folder, run) != token:
            raise RecycleError(f"{folder} is not the folder here that the log of this host is in")
        self.folder, self._run, self.token = folder, run, token
        self._runs: dict[str, str] = {}  # by segment name: its run, which does not change
        door = Door(secret, Port.LOGS, f"at the logs in {folder}", stranger)
        try:
            self._listener = Listener(host, door, "logs", say, self._answer, HELLO_S, most=MOST)
        except OSError as error:
            raise RecycleError(f"{host}: no process could fetch logs there ({error.strerror})") from error
        self.address = self._listener.address

    def close(self) -> None:
        """Stop accepting, and end all connections."""
        self._listener.close()

    # --- what is served ------------------------------------------------------------------------------

    def _answer(self, own: socket.socket, proved: Proved) -> None:
        """Answer one question after another. Raises Nonsense, EOFError and OSError."""
        line = LogLine(*proved)
        listed: dict[str, Path] = {}
        while True:
            match line.hear(object, LONGEST_QUESTION):
                case Ask(run, token) if (run, token) == (self._run, self.token):
                    listed, listing = self._there()
                    line.say(listing)
                    line.connection.settimeout(IDLE_S)
                case Want(name, offset, size) if name in listed and offset >= 0 and 0 < size <= PIECE_BYTES:
                    self._give(line, listed[name], offset, size)
                case other:
                    why = f"{str(other)[:200]} asks for a log that is not here"
                    line.say(Refusal(why))
                    raise Nonsense(why)

    def _there(self) -> tuple[dict[str, Path], Listing]:
        """Return the segments of this run by name, and the list to send: each worker's oldest ones first."""
        found, listing = {}, []
        for paths in files(self.folder).values():
            for path in paths.values():
                try:
                    if self._run_of(path) == self._run:
                        listing.append(Listed(path.name, path.stat().st_size))
                        found[path.name] = path
                except (Damaged, OSError):  # just begun, just deleted, or no segment
                    continue
        return found, Listing(tuple(listing))

    def _run_of(self, path: Path) -> str:
        if path.name not in self._runs:
            self._runs[path.name] = head(path).stream.run_id
        return self._runs[path.name]

    @staticmethod
    def _give(line: LogLine, path: Path, offset: int, wanted: int) -> None:
        with path.open("rb") as file:
            size = max(0, min(wanted, file.seek(0, 2) - offset))
            line.say(Piece(size))
            if size and line.connection.sendfile(file, offset, size) < size:  # the file was cut meanwhile
                raise EOFError
