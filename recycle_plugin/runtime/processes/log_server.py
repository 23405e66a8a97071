"""A supervisor's door to the log of its host: it serves the segments in its worker's folder, also when that is dead.

Every supervisor has one, since any of them may be the last one left on its host; whoever reads asks one of those that
serve a folder, and the next where that one is gone.  Only segments of this run are served, by their own heads, and
only what has a segment's name: there is no other way to a file.

Threads do it all, and a disk that is slow keeps nothing else waiting.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

from recycle_plugin.authentication.door import Door, Say
from recycle_plugin.authentication.handshake import Port
from recycle_plugin.authentication.secret import Secret
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.log import served
from recycle_plugin.runtime.log.segment import Damaged, files, head
from recycle_plugin.runtime.log.served import (
    LONGEST_QUESTION,
    PIECE_BYTES,
    Ask,
    Line,
    Listed,
    Listing,
    Nonsense,
    Piece,
    Refusal,
    Want,
)
from recycle_plugin.runtime.system.accepting import Refusals

HELLO_S = 10.0  # how long who has connected may take to say what it wants
IDLE_S = 60.0  # how long a line may be used for nothing
MOST = 256  # lines at a time
END_S = 1.0  # how long each thread may take to end


class LogServer:
    """Serves the segments of ``run`` that are in ``folder``, which has this ``token``, at a free port of ``host``.

    ``secret``: the job's.  ``say`` gets a line on the first who does not ask as one asks here, and ``count`` what a
    Door says of strangers.  Raises RecycleError where it can't be.
    """

    def __init__(
        self, folder: Path, run: str, token: str, host: str, secret: Secret, say: Callable[[str], None], count: Say
    ) -> None:
        if not folder.is_dir() or served.token_of(folder, run) != token:
            raise RecycleError(f"{folder} is not the folder here that the log of this host is in")
        self.folder, self._run, self.token = folder, run, token
        self._say, self._said = say, False
        self._runs: dict[str, str] = {}  # by a segment's name, whose it is; that does not change
        self._lines: dict[socket.socket, threading.Thread] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=64)
        except OSError as error:
            raise RecycleError(f"{host}: nobody could come there for logs ({error.strerror})") from error
        self.address = f"tcp://{host}:{self._listener.getsockname()[1]}"
        self._refusals = Refusals(say)
        self._door = Door(secret, Port.LOGS, f"at the logs in {folder}", count)
        self._thread = threading.Thread(target=self._accept, name="recycle: logs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more, and end all lines."""
        self._closed.set()
        served.shut(self._listener)
        self._thread.join(END_S)
        self._listener.close()
        with self._lock:
            lines = dict(self._lines)
        for connection in lines:
            served.shut(connection)
        for thread in lines.values():
            thread.join(END_S)

    # --- who comes ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed.is_set():
            while not self._closed.is_set() and (pause_s := self._door.pause_s()):
                self._closed.wait(pause_s)
            try:
                connection, peer = self._listener.accept()
                self._let_in(connection, peer)
            except OSError as error:
                if not self._closed.is_set():
                    self._closed.wait(self._refusals.pause_s(error))

    def _let_in(self, connection: socket.socket, peer: tuple) -> None:
        """Serve who has connected, in a thread: everybody comes in here, and nowhere else."""
        name = "recycle: a log's reader"
        thread = threading.Thread(target=self._serve, args=(connection, peer), name=name, daemon=True)
        with self._lock:
            if len(self._lines) >= MOST:
                connection.close()  # who means it comes again
                return
            self._lines[connection] = thread
        self._door.comes(connection)
        thread.start()

    def _serve(self, connection: socket.socket, peer: tuple) -> None:
        try:
            with connection:
                if (proved := self._door.lets_in(connection, peer)) is not None:
                    connection.settimeout(HELLO_S)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._answer(Line(*proved))
        except Nonsense as nonsense:
            if not self._said:  # once: whoever asks may come more often
                self._said = True
                self._say(f"a connection from {peer[0]}:{peer[1]} asks for no log: {nonsense}")
        except (OSError, EOFError):
            pass
        with self._lock:
            self._lines.pop(connection, None)

    # --- what is served ------------------------------------------------------------------------------

    def _answer(self, line: Line) -> None:
        """Answer one question after another.  Raises Nonsense, EOFError and OSError."""
        listed: dict[str, Path] = {}
        while True:
            match line.hear_any(LONGEST_QUESTION):
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
    def _give(line: Line, path: Path, offset: int, wanted: int) -> None:
        with path.open("rb") as file:
            size = max(0, min(wanted, file.seek(0, 2) - offset))
            line.say(Piece(size))
            if size and line.connection.sendfile(file, offset, size) < size:  # it was cut meanwhile
                raise EOFError
