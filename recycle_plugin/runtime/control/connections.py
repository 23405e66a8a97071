"""Connections that carry the messages of core/messages/protocol.py: the port, over sockets, and within one process.

A worker's threads wait in ``send`` and ``receive``, each with a deadline.  The event loops of the coordinator and of
the supervisors wait for nobody: there a connection is in an InLoop (in_loop.py).  Both implementations carry the same
frames (core/messages/encoding.py), so malformed bytes are dealt with in one place.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from recycle_plugin.authentication.datagrams import SealedDatagrams
from recycle_plugin.authentication.handshake import SEAL, Port, Proved, Seals, Stranger, call
from recycle_plugin.authentication.secret import Known, NoSecret, NotThere
from recycle_plugin.authentication.tls_socket import Connection
from recycle_plugin.core.messages.encoding import LIMIT, Frames, encode
from recycle_plugin.core.messages.from_coordinator import Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.kept import UNCOUNTED, Heard, Kept
from recycle_plugin.core.messages.mirroring import Got, Knows, StandsBy
from recycle_plugin.core.messages.typed import Unreadable
from recycle_plugin.runtime.system import forked

RETRY_S = 0.05  # between two attempts to connect
ATTEMPT_S = 5.0  # one of them
AT_HOME_S = 1.5  # how long who listened where the connection led is tried, before who stands by elsewhere is
TRY_S = 1.0  # and then each of them in turn
APART = 2  # times the silence after which the coordinator is taken for dead: others find so later
PIECE = 1 << 18  # bytes that are read at once
UNSENT = 4 * LIMIT  # bytes that may wait for an other end that takes nothing


@dataclass(frozen=True)
class Disconnected:
    """Why nothing comes any more over a connection.  ``unreadable``: what has come, where that was no message."""

    why: str
    unreadable: Unreadable | None = None

    def __str__(self) -> str:
        return self.why


class Control(Protocol):
    """One end of a connection for messages between processes.

    What is sent comes out of the other end in the same order, each message whole and once; when the connection breaks,
    the last ones may not have got there.  Every thread may call anything at any time, and nothing raises because the
    connection is broken.

    ``here`` is this end's address, on the interface that reaches the other; ``there`` is host and port of the other,
    None within a process.  ``datagrams``: what seals those of this connection's caller, others after each
    :meth:`resume`; None within a process.
    """

    here: str
    there: tuple[str, int] | None
    datagrams: SealedDatagrams | None

    @property
    def address(self) -> tuple[str, int] | None:
        """The address, host and port, at which the last listener has let this end in; None at the other end, and
        within a process.
        """

    @property
    def broken(self) -> Disconnected | None:
        """Why the connection is broken; None as long as something may come.

        A peer's death breaks it once all that it has said is handed out, and so does what is no message.
        """

    def send(self, message: object, timeout_s: float = 0.0, more: bool = False) -> bool:
        """Send a message; False where the other end has not taken all that was sent.

        That breaks the connection after ``timeout_s`` seconds; with 0 the rest is kept for :meth:`push`.  ``message``
        may also be the frame that core.messages.encoding.encode has made of one for several; raises what that does.
        ``more``: another one follows at once, and it goes along with that.
        """

    def push(self) -> bool:
        """Send what :meth:`send` has kept, as far as the other end takes it; False where some of it is left."""

    @property
    def sent(self) -> int:
        """How many messages this end has sent since it was welcomed."""

    def has_got(self, count: int, timeout_s: float = 0.0) -> bool:
        """Whether the other end says within ``timeout_s`` seconds that it has the first ``count`` messages; somebody
        has to receive meanwhile.
        """

    def receive(self, timeout_s: float = 0.0) -> object | None:
        """The next message; None where the connection is broken, or nothing has come within ``timeout_s`` seconds."""

    def resume(self, hello: Hello, timeout_s: float) -> Welcome | None:
        """Make the connection again, with ``hello`` as its first message, and return the answer to that, None where it
        does not stand.

        Only the side that has made it can.  Where whoever answers still has the connection, which the answer's ``line``
        says, all goes on as if it had never been broken: what was under way either way is sent again.  Else it is a new
        one: the coordinator puts a supervisor that comes again in the place of the one before, and its worker does not
        notice; a worker's broken connection is its end, since others are told of its loss at once.
        """

    def give_up(self, why: str) -> None:
        """Take it for broken, where :meth:`resume` may turn to somebody else; whoever receives finds that."""

    def close(self) -> None:
        """Close it, also for those who wait in it now; the other end gets all that is on its way, and then finds the
        end.
        """

    def fileno(self) -> int:
        """A descriptor for ``select``: readable when something can be received, writable when something can be
        pushed.
        """


class _Framed:
    """What both implementations have in common: messages in, frames out.

    Subclasses move bytes, as non-blocking sockets do.  With ``seals`` every frame has one behind it.
    """

    def __init__(self, limit: int, seals: Seals | None = None) -> None:
        self._limit = limit
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        # its number at the coordinator, once that has welcomed this end, and what shows that it is this one's
        self.line, self._token = -1, ""
        self._kept, self._heard = Kept(), Heard()
        self._term = StandsBy(0, "", 0, 0.0)  # the last that this end knows of
        self._acknowledged = threading.Condition()
        self._begin(seals)

    def _begin(self, seals: Seals | None) -> None:
        self._seals, self._unsent, self._mute = seals, bytearray(), False
        self._frames = Frames(self._limit) if seals is None else Frames(self._limit, SEAL, seals.into.fits)
        self.datagrams = None if seals is None else SealedDatagrams(seals.datagrams)
        self.broken: Disconnected | None = None

    def _go_on(self, fresh: _Framed, welcome: Welcome) -> None:
        """Go on with what a ``fresh`` connection has, whose answer is ``welcome``; call it under both locks."""
        self._seals, self._unsent, self._mute = fresh._seals, bytearray(), False
        self._frames, self.datagrams, self.broken = fresh._frames, fresh.datagrams, None
        if welcome.line != self.line:  # another one than before
            self.line, self._token, self._kept, self._heard = welcome.line, welcome.token, Kept(), Heard()
        self._got(welcome.heard)
        for frame in self._kept.since(welcome.heard):
            self._add(frame)
        self._push(0.0)

    def _again(self, hello: Hello) -> Hello:
        """The ``hello`` of who comes again."""
        return replace(hello, line=self.line, heard=self._heard.count, token=self._token, term=self._term.term)

    def _add(self, frame: bytes) -> None:
        self._unsent += frame
        if self._seals is not None:
            self._unsent += self._seals.out.of(frame)

    def send(self, message: object, timeout_s: float = 0.0, more: bool = False) -> bool:
        frame = message if isinstance(message, bytes) else encode(message)
        with self._sending:
            if self.line >= 0 and not isinstance(message, UNCOUNTED):
                self._kept.add(frame)
            if not self._mute and self.broken is None:
                self._add(frame)
            return more or self._push(timeout_s)

    def push(self) -> bool:
        with self._sending:
            return self._push(0.0)

    def receive(self, timeout_s: float = 0.0) -> object | None:
        deadline = time.monotonic() + timeout_s
        while (message := self._next(deadline)) is not None:
            if self._is_news(message):
                break
        return message

    def _next(self, deadline: float) -> object | None:
        with self._receiving:
            while self.broken is None:
                message = self._frames.take()
                if isinstance(message, Unreadable):
                    self._break(Disconnected(str(message), message))
                elif message is not None:
                    return message
                elif not self._fill(deadline):
                    break
        return None

    def _got(self, count: int) -> None:
        with self._acknowledged:
            self._kept.got(count)
            self._acknowledged.notify_all()

    @property
    def sent(self) -> int:
        return self._kept.count

    def has_got(self, count: int, timeout_s: float = 0.0) -> bool:
        with self._acknowledged:
            return self._acknowledged.wait_for(lambda: self._kept.dropped >= count, timeout_s)

    def _is_news(self, message: object) -> bool:
        """Take note of how far either end is, at the end that was welcomed; whether that was not all of ``message``."""
        if isinstance(message, Welcome) and self.line < 0:
            self.line, self._token = message.line, message.token
        if self.line < 0:
            return True
        if isinstance(message, StandsBy):
            self._learn(message)
            return False
        if isinstance(message, Got):
            with self._sending:
                self._got(message.count)
            return False
        if not isinstance(message, UNCOUNTED) and self._heard.is_due(message):
            self.send(Got(self._heard.count))
        return True

    def _learn(self, term: StandsBy) -> None:
        """Take note of a term, and of who stands by in it."""
        if term.term >= self._term.term:
            self._term = term
            self.send(Knows(term.term))

    def give_up(self, why: str) -> None:
        if self._term.host:
            self._break(Disconnected(why))

    def close(self) -> None:
        self._break(Disconnected("it was closed on this side"))
        with self._sending, self._receiving:  # those who wait in it have been woken
            self._release()

    def _push(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._unsent and self.broken is None:
            try:
                del self._unsent[: self._write(self._unsent)]
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return self._overdue(timeout_s)
                self._await(select.POLLOUT, deadline)
            except (
                OSError
            ):  # what the other end has said before it went is still to be read, and then the reader finds the end
                self._mute = True
                self._unsent.clear()
                self._shut()
        return not self._unsent or self.broken is not None

    def _overdue(self, timeout_s: float) -> bool:
        if timeout_s:
            self._break(Disconnected(f"the other end has taken nothing for {timeout_s:g} s"))
        elif len(self._unsent) > UNSENT:
            self._break(Disconnected(f"the other end takes nothing, and {len(self._unsent)} bytes wait for it"))
        return False

    def _fill(self, deadline: float) -> bool:
        """Read what is there, or wait for it; False when the deadline has passed."""
        try:
            data = self._read()
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            self._await(select.POLLIN, deadline)
        except OSError as error:
            self._break(Disconnected(error.strerror or str(error)))
        else:
            if data:
                self._frames.feed(data)
            else:
                self._break(
                    Disconnected("the other end is gone" + ", in the middle of a message" * self._frames.broken_off)
                )
        return True

    def _break(self, why: Disconnected) -> None:
        if self.broken is None:
            self.broken = why
        self._shut()

    def _await(self, what: int, deadline: float) -> None:
        """Wait until the descriptor is so, or the connection is shut."""
        poll = select.poll()
        poll.register(self.fileno(), what)
        poll.poll(max(1.0, (deadline - time.monotonic()) * 1000))

    def fileno(self) -> int:
        raise NotImplementedError

    def _write(self, data: bytearray) -> int:
        raise NotImplementedError

    def _read(self) -> bytes:
        """The bytes that have come; empty at the end."""
        raise NotImplementedError

    def _shut(self) -> None:
        """Wake whoever waits, here and at the other end.  What has come can still be read, and then the end."""

    def _release(self) -> None:
        """Give the descriptors back, when nobody is in it any more.  May be called again."""


# --- over sockets ------------------------------------------------------------------------------------


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
                break
            except (OSError, NotThere):
                if time.monotonic() + RETRY_S >= deadline:
                    raise
                time.sleep(RETRY_S)
        try:
            left_s = max(RETRY_S, deadline - time.monotonic())  # others may wait before this one to be let in
            return call(forked.own(connection), self.known.read(), Port.CONTROL, left_s)
        except (OSError, NoSecret):
            connection.close()
            raise


class SocketControl(_Framed):
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
        home, elsewhere = self._way, None
        if self._term.host and self.line >= 0:
            elsewhere = replace(home, address=(self._term.host, self._term.port))
            timeout_s += APART * self._term.silent_s  # others may come there later
        began = time.monotonic()
        deadline, way = began + timeout_s, home
        while (left_s := deadline - time.monotonic()) > 0:
            at_home = way is not home or elsewhere is None or time.monotonic() < began + AT_HOME_S
            way = home if at_home or elsewhere is None else elsewhere
            try:
                fresh = SocketControl(way.go(min(left_s, ATTEMPT_S if elsewhere is None else TRY_S)), way, self._limit)
            except NoSecret:
                break
            except OSError:  # who listened has died since, or nobody does
                time.sleep(RETRY_S)
                continue
            fresh.send(self._again(hello))
            welcome = self._answer(fresh, deadline)
            if isinstance(welcome, Welcome):
                with self._sending, self._receiving:
                    self._socket, self._way, self.here, self.there = fresh._socket, way, fresh.here, fresh.there
                    self._go_on(fresh, welcome)
                    self._heed_silence()
                return welcome
            fresh.close()
            if welcome is not None or way is elsewhere:  # it is refused, or there is no way back
                break
        return None

    def _answer(self, fresh: SocketControl, deadline: float) -> object | None:
        """The answer that comes over a ``fresh`` connection; who answers may have to know first that this end knows of
        a term.
        """
        while isinstance(answer := fresh.receive(max(0.0, deadline - time.monotonic())), StandsBy):
            if answer.term >= self._term.term:
                self._term = answer
                fresh.send(Knows(answer.term))
        return answer

    def _learn(self, term: StandsBy) -> None:
        super()._learn(term)
        self._heed_silence()

    def _heed_silence(self) -> None:
        """Have a host that is gone for so long break the connection, where there is another one to turn to."""
        silent_ms = int(1000 * self._term.silent_s) if self._term.host else 0
        with suppress(OSError):  # it is broken
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_ms)

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


# --- within a process ----------------------------------------------------------------------------------


class _Wire:
    """Bytes one way, as many as there is memory for.  ``fd`` is readable while there are some, and at the end."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._pieces: deque[bytes] = deque()
        self._ended = False

    def put(self, data: bytes) -> None:
        with self._lock:
            if self._ended:
                raise BrokenPipeError
            self._pieces.append(data)
            os.eventfd_write(self.fd, 1)

    def get(self) -> bytes:
        with self._lock:
            if not self._pieces and not self._ended:
                raise BlockingIOError
            piece = self._pieces.popleft() if self._pieces else b""
            if not self._pieces and not self._ended:
                os.eventfd_read(self.fd)
            return piece

    def end(self) -> None:
        with self._lock:
            if not self._ended:
                self._ended = True
                os.eventfd_write(self.fd, 1)

    def release(self) -> None:
        self.end()
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


class InProcess(_Framed):
    """A connection between two threads or tasks of one process.

    ``answer`` is called with the other end, now and each time that it is resumed; it is None for that end itself.
    """

    here = "127.0.0.1"
    there: tuple[str, int] | None = None
    address: tuple[str, int] | None = None

    def __init__(
        self, answer: Callable[[InProcess], object] | None, limit: int = LIMIT, wires: tuple[_Wire, _Wire] | None = None
    ) -> None:
        self._answer = answer
        super().__init__(limit)
        self._in, self._out = wires or self._called()

    def _called(self) -> tuple[_Wire, _Wire]:
        assert self._answer is not None, "this is the end that was called"
        wires = _Wire(), _Wire()
        self._answer(InProcess(None, self._limit, wires[::-1]))
        return wires

    def resume(self, hello: Hello, timeout_s: float) -> Welcome | None:
        """Give whoever answers a new other end; see Control.resume."""
        if self._answer is None:
            return None
        self.close()
        fresh = InProcess(self._answer, self._limit)
        fresh.send(self._again(hello))
        welcome = fresh.receive(timeout_s)
        if not isinstance(welcome, Welcome):
            fresh.close()
            return None
        with self._sending, self._receiving:
            self._in, self._out = fresh._in, fresh._out
            self._go_on(fresh, welcome)
        return welcome

    def fileno(self) -> int:
        """The descriptor of an eventfd that is readable while bytes wait."""
        return self._in.fd

    def _write(self, data: bytearray) -> int:
        self._out.put(bytes(data))
        return len(data)

    def _read(self) -> bytes:
        return self._in.get()

    def _shut(self) -> None:
        self._out.end()
        self._in.end()

    def _release(self) -> None:
        self._in.release()
