"""Copies of log segments on other hosts' disks, for a worker that replays a stage or helps with it.

Segments in this worker's own folder are read there. For each other folder a thread asks a server
(runtime/processes/log_server.py) for the wanted segments, and again for their growth. The oldest come first, so a
replay begins before all are there. Segments only grow, and their CRCs reveal any other change, so copies need no
protection of their own.
"""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Collection
from pathlib import Path

from recycle_plugin import folders
from recycle_plugin.authentication.handshake import Port
from recycle_plugin.authentication.secret import Secret
from recycle_plugin.core.messages.from_coordinator import LogsAt
from recycle_plugin.runtime.lines.frames import Nonsense, end, exactly, peer_at, proved
from recycle_plugin.runtime.log.segment import NAME
from recycle_plugin.runtime.log.served import PIECE_BYTES, Ask, Listed, Listing, LogLine, Piece, Want
from recycle_plugin.runtime.system import forked

ANSWER_S = 10.0  # seconds that a server may take for an answer
END_S = 15.0  # seconds that the threads may take to end


def mirror_in(folder: Path, rank: int) -> Path:
    """Return the folder for the copies of the worker of ``rank``, whose own log is in ``folder``."""
    return folder / f"{rank}.mirror"


class Mirror:
    """A mirror in ``folder`` of the segments of ``run`` that others serve ``at`` their addresses; ``secret``: the
    job's. It makes the folder, emptied of a former process's copies, and looks for more every ``look_s`` seconds.
    ``moved``: the monotonic time at which something last arrived. Raises NotSaved.
    """

    def __init__(self, folder: Path, run: str, at: Collection[LogsAt], secret: Secret, look_s: float) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folders.make(folder)
        self.folder, self.moved = folder, time.monotonic()
        self._secret = secret
        self._run, self._look_s, self._closed = run, look_s, threading.Event()
        self._faults: dict[str, str] = {}  # by token: what is wrong there
        self._connections: dict[str, socket.socket] = {}  # by token
        name = "recycle: others' logs"
        self._threads = [threading.Thread(target=self._follow, args=(each,), name=name, daemon=True) for each in at]
        for thread in self._threads:
            thread.start()

    def faults(self) -> list[str]:
        """Return, in words, the logs that can't be fetched, and why."""
        return [self._faults[token] for token in sorted(self._faults)]

    def close(self) -> None:
        """Stop fetching, and remove the copies."""
        self._closed.set()
        for connection in list(self._connections.values()):
            end(connection)
        until = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _follow(self, at: LogsAt) -> None:
        """Fetch the wanted segments of a folder, from its servers in turn."""
        turn = 0
        while not self._closed.is_set():
            address = at.addresses[turn % len(at.addresses)]
            try:
                self._fetch_from(at, address)
            except (OSError, EOFError, Nonsense) as error:
                ranks = ", ".join(map(str, at.ranks))
                self._faults[at.token] = f"the logs of ranks {ranks} can't be fetched from {address}: {error}"
                turn += 1
            self._closed.wait(self._look_s)

    def _fetch_from(self, at: LogsAt, address: str) -> None:
        """Fetch everything, and its growth, until closed. Raises OSError, EOFError and Nonsense."""
        with forked.own(socket.create_connection(peer_at(address), ANSWER_S)) as connection:
            self._connections[at.token] = connection
            line = LogLine(*proved(connection, self._secret, Port.LOGS, ANSWER_S))
            connection.settimeout(ANSWER_S)
            while not self._closed.is_set():
                line.say(Ask(self._run, at.token))
                for listed in sorted(line.hear(Listing).segments, key=_oldest):
                    if self._is_wanted(at, listed):
                        self._fetch(line, listed)
                self._faults.pop(at.token, None)
                self._closed.wait(self._look_s)

    @staticmethod
    def _is_wanted(at: LogsAt, listed: Listed) -> bool:
        match = NAME.fullmatch(listed.name)
        if match is None:
            raise Nonsense(f"{listed.name[:80]!r} is no segment's name")
        return int(match[1]) in at.ranks

    def _fetch(self, line: LogLine, listed: Listed) -> None:
        """Fetch a segment's growth, or all of it again if it was cut after a torn record, shorter than the copy."""
        path = self.folder / listed.name
        have = path.stat().st_size if path.exists() else 0
        with path.open("ab" if have <= listed.size else "wb") as file:
            while (have := file.tell()) < listed.size and not self._closed.is_set():
                line.say(Want(listed.name, have, min(PIECE_BYTES, listed.size - have)))
                size = line.hear(Piece).size
                if size > PIECE_BYTES:
                    raise Nonsense(f"a piece of {size} bytes, and at most {PIECE_BYTES} were wanted")
                if size <= 0:
                    return  # it was cut or deleted
                file.write(exactly(line.connection, size))
                file.flush()
                self.moved = time.monotonic()


def _oldest(listed: Listed) -> tuple[int, str]:
    match = NAME.fullmatch(listed.name)
    return (int(match[3]) if match else 0, listed.name)
