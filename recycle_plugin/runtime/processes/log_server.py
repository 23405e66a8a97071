"""A supervisor's door to the log of its host: it serves the segments in its worker's folder, also when that is dead.

Every supervisor has one, since any of them may be the last one left on its host; whoever reads asks one of those that
serve a folder, and the next where that one is gone.  Only segments of this run are served, by their own heads, and
only what has a segment's name: there is no other way to a file.

Threads do it all, and a disk that is slow keeps nothing else waiting.
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

HELLO_S = 10.0  # how long who has connected may take to say what it wants
IDLE_S = 60.0  # how long a line may be used for nothing
MOST = 256  # lines at a time


class LogServer:
    """Serves the segments of ``run`` that are in ``folder``, which has this ``token``, at a free port of ``host``.

    ``secret``: the job's.  ``say`` gets a line on the first who does not ask as one asks here, and ``stranger`` what
    a Door says.  Raises RecycleError where it can't be.
    """

    def __init__(
        self, folder: Path, run: str, token: str, host: str, secret: Secret, say: Callable[[str], None], stranger: Say
    ) -> None:
        if not folder.is_dir() or served.token_of(folder, run) != token:
            raise RecycleError(f"{folder} is not the folder here that the log of this host is in")
        self.folder, self._run, self.token = folder, run, token
        self._runs: dict[str, str] = {}  # by a segment's name, whose it is; that does not change
        door = Door(secret, Port.LOGS, f"at the logs in {folder}", stranger)
        try:
            self._listener = Listener(host, door, "logs", say, self._answer, HELLO_S, most=MOST)
        except OSError as error:
            raise RecycleError(f"{host}: nobody could come there for logs ({error.strerror})") from error
        self.address = self._listener.address

    def close(self) -> None:
        """Let nobody in any more, and end all lines."""
        self._listener.close()

    # --- what is served ------------------------------------------------------------------------------

    def _answer(self, own: socket.socket, proved: Proved) -> None:
        """Answer one question after another.  Raises Nonsense, EOFError and OSError."""
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
                    why = f"{str(other)[:200]} is for nothing that is here"
                    line.say(Refusal(why))
                    raise Nonsense(why)

    def _there(self) -> tuple[dict[str, Path], Listing]:
        """The segments of this run, by their names, and as they are listed: a worker's oldest ones first."""
        found, listing = {}, []
        for paths in files(self.folder).values():
            for path in paths.values():
                try:
                    if self._run_of(path) == self._run:
                        listing.append(Listed(path.name, path.stat().st_size))
                        found[path.name] = path
                except (Damaged, OSError):  # just begun, just let go, or nobody's
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
            if size and line.connection.sendfile(file, offset, size) < size:  # it was cut meanwhile
                raise EOFError
