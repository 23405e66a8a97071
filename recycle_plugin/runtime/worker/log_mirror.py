"""Copies of the segments that are on other hosts' disks, for a worker that replays a stage or helps with it.

What this worker's own folder has it reads there.  Of each other folder a thread asks whoever serves it
(runtime/processes/log_server.py) for the segments that are wanted, and again and again for what they have grown by;
the oldest come first, so that a replay begins before all are there.  Segments only grow, and what has changed all the
same their CRCs show: so a copy needs no protection of its own.
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

ANSWER_S = 10.0  # how long who serves may take for an answer
END_S = 15.0  # how long the threads may take to end


def mirror_in(folder: Path, rank: int) -> Path:
    """Where the worker of ``rank`` has its copies, whose own log is in ``folder``."""
    return folder / f"{rank}.mirror"


class Mirror:
    """A mirror in ``folder``, which it makes, and empties of what a process before has left, of the segments of ``run``
    that are ``at`` others, who know the job's ``secret``.  It looks for more every ``look_s`` seconds.  Raises
    NotSaved.

    ``moved``: when something has come last, on the monotonic clock.
    """

    def __init__(self, folder: Path, run: str, at: Collection[LogsAt], secret: Secret, look_s: float) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folders.make(folder)
        self.folder, self.moved = folder, time.monotonic()
        self._secret = secret
        self._run, self._look_s, self._closed = run, look_s, threading.Event()
        self._faults: dict[str, str] = {}  # by token, what is wrong with what is there
        self._connections: dict[str, socket.socket] = {}  # by token
        name = "recycle: others' logs"
        self._threads = [threading.Thread(target=self._follow, args=(each,), name=name, daemon=True) for each in at]
        for thread in self._threads:
            thread.start()

    def faults(self) -> list[str]:
        """What can't be had, and why, in words."""
        return [self._faults[token] for token in sorted(self._faults)]

    def close(self) -> None:
        """Fetch no more, and remove what there is."""
        self._closed.set()
        for connection in list(self._connections.values()):
            end(connection)
        until = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _follow(self, at: LogsAt) -> None:
        """Fetch what is wanted of a folder, from one of those who serve it after the other."""
        turn = 0
        while not self._closed.is_set():
            address = at.addresses[turn % len(at.addresses)]
            try:
                self._fetch_from(at, address)
            except (OSError, EOFError, Nonsense) as error:
                ranks = ", ".join(map(str, at.ranks))
                self._faults[at.token] = f"the logs of ranks {ranks} do not come from {address}: {error}"
                turn += 1
            self._closed.wait(self._look_s)

    def _fetch_from(self, at: LogsAt, address: str) -> None:
        """Fetch all that is there, and what comes, until it is enough.  Raises OSError, EOFError and Nonsense."""
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
        """Fetch what a segment has grown by.  Behind a torn record it may have been cut: then all of it comes again."""
        path = self.folder / listed.name
        have = path.stat().st_size if path.exists() else 0
        with path.open("ab" if have <= listed.size else "wb") as file:
            while (have := file.tell()) < listed.size and not self._closed.is_set():
                line.say(Want(listed.name, have, min(PIECE_BYTES, listed.size - have)))
                size = line.hear(Piece).size
                if size > PIECE_BYTES:
                    raise Nonsense(f"a piece of {size} bytes, and at most {PIECE_BYTES} were wanted")
                if size <= 0:
                    return  # it was cut, or let go
                file.write(exactly(line.connection, size))
                file.flush()
                self.moved = time.monotonic()


def _oldest(listed: Listed) -> tuple[int, str]:
    match = NAME.fullmatch(listed.name)
    return (int(match[3]) if match else 0, listed.name)
