"""Control messages over sockets, to a listener, or, where that is gone, to who stands by on another host."""

from __future__ import annotations

import socket
import termios
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from fcntl import ioctl

from recycle_plugin.authentication.handshake import Port, Proved, Stranger, call
from recycle_plugin.authentication.secret import Known, NoSecret, NotThere
from recycle_plugin.authentication.tls_socket import Connection
from recycle_plugin.core.messages.encoding import LIMIT
from recycle_plugin.core.messages.from_coordinator import Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.line_end import TRY_S, Tries
from recycle_plugin.core.messages.mirroring import StandsBy
from recycle_plugin.runtime.control.framed import Framed
from recycle_plugin.runtime.system import forked

RETRY_S = 0.05  # between two attempts to connect
ATTEMPT_S = 5.0  # one of them
PIECE = 1 << 18  # bytes that are read at once


@dataclass(frozen=True)
class ControlWay:
    """The way to a listener for control messages: its ``address``, and what has the secret of its job."""

    address: tuple[str, int]
    known: Known

    def go(self, timeout_s: float) -> Proved:
        """A connection that has authenticated, once somebody listens there.

        Raises OSError, Stranger (which is one) where another one listens, and NoSecret.  The secret is read once
        somebody does listen: a file may be that of a job before until then.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if not self.known.there:
                    self.known.read()
                connection = socket.create_connection(
                    self.address, timeout=max(RETRY_S, min(ATTEMPT_S, deadline - time.monotonic()))
                )
                return self._prove(connection, max(RETRY_S, deadline - time.monotonic()))
            except Stranger:
                raise
            except (OSError, NotThere):  # also where who listened has died since
                if time.monotonic() + RETRY_S >= deadline:
                    raise
                time.sleep(RETRY_S)

    def _prove(self, connection: socket.socket, left_s: float) -> Proved:
        """Authenticate; others may wait before this one to be let in."""
        try:
            return call(forked.own(connection), self.known.read(), Port.CONTROL, left_s)
        except (OSError, NoSecret):
            connection.close()
            raise


class SocketControl(Framed):
    """A connection over one that has ``proved`` to be of this job, which belongs to it from now on.

    ``way``: to the listener, given by the side that has made the connection, which can resume it.
    """

    def __init__(self, proved: Proved, way: ControlWay | None = None, limit: int = LIMIT) -> None:
        self._way = way
        self._take(proved.connection)
        super().__init__(limit, proved.seals)

    @property
    def address(self) -> tuple[str, int] | None:
        return None if self._way is None else self._way.address

    def _take(self, connection: Connection) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.here, self.there = connection.getsockname()[0], connection.getpeername()[:2]

    def resume(self, hello: Hello, timeout_s: float) -> Welcome | None:
        """Connect to the same address again, or to who stands by elsewhere; see Control.resume.

        Once that one has heard of it, this end never comes to the first again (core/coordinator/succession.py).
        """
        if self._way is None:
            return None
        self.close()
        home = self._way
        tries = Tries(time.monotonic(), timeout_s, self._there(hello) is not None, self._term.silent_s)
        while (left_s := tries.until - time.monotonic()) > 0:
            elsewhere = self._there(hello)  # the last term may be another one by now
            way = elsewhere if tries.next(time.monotonic(), elsewhere is not None) and elsewhere is not None else home
            try:
                fresh = SocketControl(way.go(min(left_s, ATTEMPT_S if elsewhere is None else TRY_S)), way, self._limit)
            except NoSecret:
                break
            except OSError:  # who listened has died since, or nobody does
                time.sleep(RETRY_S)
                continue
            fresh.send(self._again(hello))
            welcome = self._answer(fresh, tries.until)
            if isinstance(welcome, Welcome):
                self._stand(fresh, welcome, way)
                return welcome
            fresh.close()
            if tries.are_over(welcome):
                break
        return None

    def _stand(self, fresh: SocketControl, welcome: Welcome, way: ControlWay) -> None:
        """Go on over a ``fresh`` connection, to the end of the ``way``."""
        with self._sending, self._receiving:
            turned, self._way = way is not self._way, way
            self._socket, self.here, self.there = fresh._socket, fresh.here, fresh.there
            self._go_on(fresh, welcome)
            if turned:
                self._has_turned()
            self._heed_silence()

    def _there(self, hello: Hello) -> ControlWay | None:
        """The way to who stands by on another host, if anybody does."""
        address = None if self._way is None else self._elsewhere(hello.role, self._way.address)
        return None if address is None or self._way is None else replace(self._way, address=address)

    def _answer(self, fresh: SocketControl, deadline: float) -> object | None:
        """The answer that comes over a ``fresh`` connection; who answers may have to know first that this end knows of
        a term.
        """
        while isinstance(answer := fresh.receive(max(0.0, deadline - time.monotonic())), StandsBy):
            if (knows := self._noted(answer)) is not None:
                fresh.send(knows)
        return answer

    def _learn(self, term: StandsBy) -> None:
        super()._learn(term)
        self._heed_silence()

    def _heed_silence(self) -> None:
        """Have a host that is gone for so long break the connection, where there is another one to turn to."""
        silent_ms = int(1000 * self._term.silent_s) if self._term.host else 0
        with suppress(OSError):  # it is broken
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_ms)

    @property
    def held_up(self) -> bool:
        """See Control; the kernel counts the bytes that it may have to send again."""
        try:
            return any(ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
        except (OSError, ValueError):  # it is closed
            return True

    def fileno(self) -> int:
        """The socket's descriptor, -1 once it is closed."""
        return self._socket.fileno()

    def _write(self, data: bytearray) -> int:
        return self._socket.send(data)

    def _read(self) -> bytes:
        return self._socket.recv(PIECE)

    def _shut(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end was first
            pass

    def _release(self) -> None:
        self._socket.close()


def connect(way: ControlWay, timeout_s: float) -> SocketControl:
    """Connect, waiting until somebody listens at the end of the ``way``.

    Raises ConnectionError, with the reason, where nobody does within ``timeout_s`` seconds; Stranger, which is one,
    where somebody does who does not know the secret; and NoSecret.
    """
    host, port = way.address
    try:
        return SocketControl(way.go(timeout_s), way)
    except Stranger as stranger:
        text = f"{host}:{port} answers, but is no coordinator of this job ({stranger})"
        raise Stranger(text + f": {stranger.advice}" * bool(stranger.advice), advice=stranger.advice) from stranger
    except (OSError, NotThere) as error:
        raise ConnectionError(f"no coordinator at {host}:{port} within {timeout_s:g} s ({error})") from error
