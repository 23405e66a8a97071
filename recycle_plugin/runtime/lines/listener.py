"""The only way into a process of the job: a port at which the job's other processes connect.

A caller proves to know the job's secret (authentication/door.py), says what it wants, and is served on its own thread.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable

from recycle_plugin.authentication.door import Door
from recycle_plugin.authentication.handshake import Proved
from recycle_plugin.runtime.lines.frames import Nonsense, end
from recycle_plugin.runtime.system import forked
from recycle_plugin.runtime.system.accepting import Refusals

END_S = 1.0  # seconds that each thread may take to end
Peer = tuple[str, int]


class Listener:
    """Serves whoever the ``door`` lets in, at a free port of ``host``.

    ``serve(connection, proved)`` serves a caller over ``proved``, whose next message has to come within ``hello_s``
    seconds. It returns whether it keeps the connection, and raises Nonsense, EOFError and OSError. ``comes(connection,
    peer)`` is called for each accepted connection, in order; if it returns False the connection is not served.
    ``gone(connection)`` is called when a connection is no longer served. ``most``: connections served at a time.
    ``say`` gets a line on the first caller that sends nonsense, and on the first for which there is no room. Raises
    OSError if ``host`` can't be listened on.
    """

    def __init__(
        self,
        host: str,
        door: Door,
        name: str,
        say: Callable[[str], None],
        serve: Callable[[socket.socket, Proved], bool | None],
        hello_s: float,
        comes: Callable[[socket.socket, Peer], bool] = lambda connection, peer: True,
        gone: Callable[[socket.socket], object] = lambda connection: None,
        most: int = 1 << 16,
    ) -> None:
        self._door, self._name, self._say, self._serve, self._hello_s = door, name, say, serve, hello_s
        self._comes, self._gone, self._most = comes, gone, most
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = forked.own(socket.create_server((host, 0), family=family, backlog=1024))
        self.family, self.port = family, int(self._listener.getsockname()[1])
        self.address = f"tcp://{host}:{self.port}"
        self._served: dict[socket.socket, threading.Thread] = {}
        self._lock, self._closed, self._said = threading.Lock(), threading.Event(), False
        self._refusals = Refusals(lambda text: say(f"{door.place} {text}"))
        self._accepting = threading.Thread(target=self._accept, name=f"recycle: {name}", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Let nobody in any more, and end all connections that are served."""
        self._closed.set()
        end(self._listener)
        self._accepting.join(END_S)
        self._listener.close()
        with self._lock:
            served = dict(self._served)
        for connection in served:
            end(connection)
        for thread in served.values():
            thread.join(END_S)

    def _accept(self) -> None:
        while not self._closed.is_set():
            while not self._closed.is_set() and (pause_s := self._door.pause_s()):
                self._closed.wait(pause_s)
            try:
                connection, peer = self._listener.accept()
                self._let_in(forked.own(connection), peer)
            except OSError as error:
                if not self._closed.is_set():
                    self._closed.wait(self._refusals.pause_s(error))

    def _let_in(self, connection: socket.socket, peer: Peer) -> None:
        """Serve a new connection on a thread. All callers come in here, and nowhere else."""
        if len(self._served) >= self._most or not self._comes(connection, peer):
            connection.close()  # a real caller comes again
            return
        name = f"recycle: {self._name}"
        thread = threading.Thread(target=self._attend, args=(connection, peer), name=name, daemon=True)
        self._door.comes(connection)
        with self._lock:
            self._served[connection] = thread
        try:
            thread.start()
        except RuntimeError:  # the other end finds its connection broken, and comes again
            self._let_go(connection, keeps=False)
            raise OSError(errno.EAGAIN, "no thread") from None

    def _attend(self, connection: socket.socket, peer: Peer) -> None:
        keeps = False
        try:
            if (proved := self._door.lets_in(connection, peer)) is not None:
                proved.connection.settimeout(self._hello_s)
                proved.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keeps = bool(self._serve(connection, proved))
        except Nonsense as nonsense:
            self._say_once(peer, nonsense)
        except (OSError, EOFError):
            pass
        finally:  # in any case the other end must not wait
            self._let_go(connection, keeps)

    def _let_go(self, connection: socket.socket, keeps: bool) -> None:
        with self._lock:
            self._served.pop(connection, None)
        if not keeps:
            connection.close()
        self._gone(connection)

    def _say_once(self, peer: Peer, nonsense: Nonsense) -> None:
        """Warn of the first nonsense only: its sender may go on."""
        with self._lock:
            first, self._said = not self._said, True
        if first:
            what = f"a process of this job, at {peer[0]}:{peer[1]}, has sent an unreadable message"
            self._say(f"{self._door.place} {what}: {nonsense}")
