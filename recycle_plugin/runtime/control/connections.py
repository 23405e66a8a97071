"""Control messages over sockets: to a listener, or if that is gone to the standby on another host."""

from __future__ import annotations

import socket
import struct
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
from recycle_plugin.core.messages.line_end import Tries
from recycle_plugin.core.messages.mirroring import StandsBy
from recycle_plugin.runtime.control.framed import Framed, is_silence
from recycle_plugin.runtime.system import forked

RETRY_S = 0.05  # s between attempts to connect
ATTEMPT_S = 5.0  # s for one attempt
SILENT_S = 30.0  # how long the other end's host may be silent before the job's deadlines are known
PROBE_S = 5  # s between the kernel's probes of a silent host
LONGEST_S = 1e6  # the most that fits the kernel's counter
PIECE = 1 << 18  # bytes per read
LAST_ACK = 56  # where tcpi_last_ack_recv, in ms, is in the kernel's struct tcp_info


@dataclass(frozen=True)
class ControlWay:
    """The way to a listener for control messages: its ``address``, and what has the secret of its job."""

    address: tuple[str, int]
    known: Known

    def go(self, timeout_s: float) -> Proved:
        """Return an authenticated connection once a process listens there. Raises OSError, Stranger (an OSError) if
        another job listens, and NoSecret. The secret is only read then: before, the file may be an earlier job's.
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
            except (OSError, NotThere):  # or the listener has died meanwhile
                if time.monotonic() + RETRY_S >= deadline:
                    raise
                time.sleep(RETRY_S)

    def _prove(self, connection: socket.socket, left_s: float) -> Proved:
        """Authenticate within ``left_s`` seconds; other callers may be let in first."""
        try:
            return call(forked.own(connection), self.known.read(), Port.CONTROL, left_s)
        except (OSError, NoSecret):
            connection.close()
            raise


class SocketControl(Framed):
    """A connection over ``proved``, an authenticated socket, which it owns from now on. ``way`` leads to the listener;
    only the end that has connected has one, and can resume.
    """

    def __init__(self, proved: Proved, way: ControlWay | None = None, limit: int = LIMIT) -> None:
        self._way = way
        self._silent_s = SILENT_S
        self._take(proved.connection)
        super().__init__(limit, proved.seals)
        if way is not None:
            self._heed_silence()

    @property
    def address(self) -> tuple[str, int] | None:
        return None if self._way is None else self._way.address

    def _take(self, connection: Connection) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.here, self.there = connection.getsockname()[0], connection.getpeername()[:2]

    def resume(self, hello: Hello, timeout_s: float) -> Welcome | None:
        """Connect again to the same address or to the standby elsewhere; see Control.resume. Once the standby has heard
        of a worker, that never returns to the first address (core/coordinator/succession.py).
        """
        if self._way is None:
            return None
        self.close()
        home, silent, now = self._way, self.broken is not None and self.broken.silent, time.monotonic()
        elsewhere, decides = self._there(hello), hello.role == "worker"
        tries = Tries(now, timeout_s, elsewhere is not None, self._term.silent_s, silent, decides)
        while (left_s := tries.until - (now := time.monotonic())) > 0:
            elsewhere = self._there(hello)  # the last term may have changed
            way = elsewhere if tries.next(now, elsewhere is not None) and elsewhere is not None else home
            try_s = ATTEMPT_S if elsewhere is None else tries.lasts_s(now)
            try:
                fresh = SocketControl(way.go(min(left_s, try_s)), way, self._limit)
            except NoSecret:
                break
            except OSError as error:  # no process listens, or the listener has died meanwhile
                silent = silent and (way is elsewhere or is_silence(error))
                time.sleep(RETRY_S)
                continue
            fresh.send(self._again(hello, silent))
            welcome = self._answer(fresh, tries.until)
            if isinstance(welcome, Welcome):
                self._stand(fresh, welcome, way)
                return welcome
            fresh.close()
            if tries.are_over(welcome):
                break
            time.sleep(RETRY_S)
        return None

    def _stand(self, fresh: SocketControl, welcome: Welcome, way: ControlWay) -> None:
        with self._sending, self._receiving:
            turned, self._way = way is not self._way, way
            self._socket, self.here, self.there = fresh._socket, fresh.here, fresh.there
            self._go_on(fresh, welcome)
            if turned:
                self._has_turned()
            self._heed_silence()

    def _there(self, hello: Hello) -> ControlWay | None:
        """Return the way to the standby on another host, if there is one."""
        address = None if self._way is None else self._elsewhere(hello.role, self._way.address)
        return None if address is None or self._way is None else replace(self._way, address=address)

    def _answer(self, fresh: SocketControl, deadline: float) -> object | None:
        """Return the answer that comes over a ``fresh`` connection. Before it, confirm a term if asked to."""
        while isinstance(answer := fresh.receive(max(0.0, deadline - time.monotonic())), StandsBy):
            if (knows := self._noted(answer)) is not None:
                fresh.send(knows)
        return answer

    def _learn(self, term: StandsBy) -> None:
        super()._learn(term)
        self._heed_silence()

    def bear_silence(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._heed_silence()

    def _heed_silence(self) -> None:
        """Have the kernel break the connection if the other end's host, probed while idle, is silent for too long."""
        silent_s = self._term.silent_s if self._term.host else self._silent_s
        with suppress(OSError):  # it is broken
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, silent_s > 0)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * min(silent_s, LONGEST_S)))

    @property
    def held_up(self) -> bool:
        """See Control; the kernel counts the bytes that are not acknowledged."""
        try:
            return any(ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
        except (OSError, ValueError):  # it is closed
            return True

    @property
    def _is_host_silent(self) -> bool:
        """Whether bytes wait for an acknowledgement, and none has come for half of the term's silence. Heartbeats are
        closer together, and a live host's kernel acknowledges them, whatever its processes do.
        """
        try:
            told = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ACK + 4)
        except OSError:
            return False
        (last_ms,) = struct.unpack_from("I", told, LAST_ACK)
        return self.held_up and last_ms > 500 * self._term.silent_s

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 once it is closed."""
        return self._socket.fileno()

    def _write(self, data: bytearray) -> int:
        return self._socket.send(data)

    def _read(self) -> bytes:
        data = self._socket.recv(PIECE)
        self._drained = len(data) < PIECE and isinstance(self._socket, socket.socket)  # TLS may have decrypted more
        return data

    def _shut(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end was first
            pass

    def _release(self) -> None:
        self._socket.close()


def connect(way: ControlWay, timeout_s: float) -> SocketControl:
    """Connect, once a process listens at the end of ``way``. Raises ConnectionError if none does within ``timeout_s``
    seconds; Stranger, a ConnectionError, if it does not know the secret; and NoSecret.
    """
    host, port = way.address
    try:
        return SocketControl(way.go(timeout_s), way)
    except Stranger as stranger:
        text = f"{host}:{port} answers, but is no coordinator of this job ({stranger})"
        raise Stranger(text + f": {stranger.advice}" * bool(stranger.advice), advice=stranger.advice) from stranger
    except (OSError, NotThere) as error:
        raise ConnectionError(f"no coordinator at {host}:{port} within {timeout_s:g} s ({error})") from error
