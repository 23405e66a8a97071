"""Connections for the messages of core/messages/protocol.py: their port, and what all implementations share.

A worker's threads block in ``send`` and ``receive``, each with a deadline. The event loops of the coordinator and of
the supervisors must not block: they wrap a connection in an InLoop (in_loop.py). The implementations, over sockets
(connections.py) and within a process (in_process.py), carry the same frames (core/messages/encoding.py), so malformed
bytes are handled in one place.
"""

from __future__ import annotations

import select
import threading
import time
from dataclasses import dataclass
from errno import ECONNABORTED, ECONNRESET, EHOSTDOWN, EHOSTUNREACH, ENETUNREACH
from typing import Protocol

from recycle_plugin.authentication.datagrams import SealedDatagrams
from recycle_plugin.authentication.handshake import SEAL, Seals
from recycle_plugin.core.messages.encoding import LIMIT, VERSION, Frames, OtherVersion, encode
from recycle_plugin.core.messages.from_coordinator import Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.line_end import LineEnd
from recycle_plugin.core.messages.mirroring import Got
from recycle_plugin.core.messages.typed import Unreadable

UNSENT = 4 * LIMIT  # bytes that may wait for an end that takes nothing


@dataclass(frozen=True)
class Disconnected:
    """Why a connection is broken. ``unreadable``: the bytes that came, if they were no message. ``silent``: nothing at
    all came from the other end's host. ``reset``: the connection was reset, so the other end may live.
    """

    why: str
    unreadable: Unreadable | None = None
    silent: bool = False
    reset: bool = False

    def __str__(self) -> str:
        return self.why


def is_reset(error: OSError) -> bool:
    """Return whether ``error`` says that a connection was reset, by the network or by a kernel that gave it up."""
    return error.errno in (ECONNRESET, ECONNABORTED)


def is_silence(error: OSError) -> bool:
    """Return whether ``error`` means that the other host is silent."""
    return isinstance(error, TimeoutError) or error.errno in (EHOSTDOWN, EHOSTUNREACH, ENETUNREACH)


class Control(Protocol):
    """One end of a connection for messages between processes.

    Messages arrive in the order in which they were sent, each whole and once. If the connection breaks, the last ones
    may be lost. Any thread may call any method at any time, and a broken connection raises nothing.

    ``here`` is this end's address, on the interface that reaches the other end. ``there`` is the other end's (host,
    port), None within a process. ``datagrams`` seals datagrams of the end that has connected, with new keys after each
    :meth:`resume`; None within a process.
    """

    here: str
    there: tuple[str, int] | None
    datagrams: SealedDatagrams | None

    @property
    def address(self) -> tuple[str, int] | None:
        """The (host, port) at which this end was let in last; None at the listening end and within a process."""

    @property
    def elsewhere(self) -> tuple[str, int] | None:
        """The (host, port) of the last standby on another host that this end knows of, None without one."""

    @property
    def broken(self) -> Disconnected | None:
        """Why the connection is broken; None as long as something may come. A peer's death breaks it once all that the
        peer has sent is received. Bytes that are no message break it too.
        """

    def send(self, message: object, timeout_s: float = 0.0, more: bool = False) -> bool:
        """Send a message, or a frame that core.messages.encoding.encode has made of one. Return False if the other end
        has not taken all that was sent.

        In that case the connection breaks after ``timeout_s`` seconds; with 0 the rest is kept for :meth:`push`.
        ``more``: hold the message back, to go out with the next one. Raises what encode raises.
        """

    def hold_all(self) -> None:
        """Keep all that waits for the other end from now on, however much it is."""

    def push(self) -> bool:
        """Send the bytes that :meth:`send` has kept, as many as the other end takes. Return False if some are left."""

    @property
    def held_up(self) -> bool:
        """Whether some sent bytes are not acknowledged, or the connection is broken. False within a process."""

    @property
    def sent(self) -> int:
        """How many messages this end has sent since it was welcomed."""

    def has_got(self, count: int, timeout_s: float = 0.0) -> bool:
        """Return whether the other end confirms ``count`` messages in time. Another thread has to receive meanwhile."""

    def receive(self, timeout_s: float = 0.0) -> object | None:
        """Return the next message; None if the connection is broken, or nothing comes within ``timeout_s`` seconds."""

    def resume(self, hello: Hello, timeout_s: float) -> Welcome | None:
        """Connect again, with ``hello`` as the first message. Return the answer, None if the connection is not
        restored. Only the end that has connected can resume.

        If the answering coordinator still knows the connection (the answer has the same ``line``), all goes on as if it
        had never been broken: both ends send again what was under way. Otherwise the connection is new. A supervisor
        that comes again takes its predecessor's place, and its worker does not notice. A worker's broken connection is
        its end, since others hear of its loss at once.
        """

    def give_up(self, why: str, unheard: int = 0, only_silent: bool = False) -> None:
        """Break the connection if :meth:`resume` may turn to another process, and the other end has not confirmed
        ``unheard`` messages; receiving then finds it broken. ``only_silent``: only if the other end's host is silent.
        """

    def bear_silence(self, silent_s: float) -> None:
        """Let the connection break after the other end's host was silent for ``silent_s`` seconds, and there is no
        standby to turn to sooner; never with 0. The end that has connected notices silence also unless it is told to.
        """

    def close(self) -> None:
        """Close the connection, also for threads that wait in it. The other end still gets all that is on its way."""

    def fileno(self) -> int:
        """Return a descriptor for ``select``: readable to receive, writable to push."""


class Framed(LineEnd):
    """What implementations share: messages in, frames out. With ``seals`` a seal follows each frame. Subclasses move
    bytes, as non-blocking sockets do.
    """

    def __init__(self, limit: int, seals: Seals | None = None) -> None:
        super().__init__()
        self._limit = limit
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._acknowledged = threading.Condition()
        self._holds_all = False
        self._begin(seals)

    def _begin(self, seals: Seals | None) -> None:
        self._seals, self._unsent, self._mute = seals, bytearray(), False
        self._drained = False  # whether the last read has taken all that had come
        self._reset = False  # whether sending has found the connection reset, which reading then does not
        self._frames = Frames(self._limit) if seals is None else Frames(self._limit, SEAL, seals.into.fits)
        self.datagrams = None if seals is None else SealedDatagrams(seals.datagrams)
        self.broken: Disconnected | None = None

    def _go_on(self, fresh: Framed, welcome: Welcome) -> None:
        """Go on with the state of a ``fresh`` connection, answered by ``welcome``. The caller holds both locks."""
        self._seals, self._unsent, self._mute = fresh._seals, bytearray(), False
        self._frames, self.datagrams, self.broken = fresh._frames, fresh.datagrams, None
        for frame in self._since(welcome):
            self._add(frame)
        self._push(0.0)

    def _add(self, frame: bytes) -> None:
        self._unsent += frame
        if self._seals is not None:
            self._unsent += self._seals.out.of(frame)

    def send(self, message: object, timeout_s: float = 0.0, more: bool = False) -> bool:
        frame = message if isinstance(message, bytes) else encode(message)
        with self._sending:
            self._keep(message, frame)
            if not self._mute and self.broken is None:
                self._add(frame)
            return more or self._push(timeout_s)

    def hold_all(self) -> None:
        self._holds_all = True

    def push(self) -> bool:
        with self._sending:
            return self._push(0.0)

    def receive(self, timeout_s: float = 0.0) -> object | None:
        deadline = time.monotonic() + timeout_s
        while (message := self._whole(self._next(deadline))) is not None:
            if isinstance(message, Unreadable):
                self._refuse(message)
                return None
            if self._is_news(message):
                break
        return message

    def _refuse(self, what: Unreadable) -> None:
        """Break the connection over bytes that are no message; an end of another version is told so first."""
        if isinstance(what, OtherVersion):
            with self._sending:
                self._unsent += VERSION
                self._push(0.0)
        self._break(Disconnected(str(what), what))

    def _next(self, deadline: float) -> object | None:
        with self._receiving:
            while self.broken is None:
                message = self._frames.take()
                if message is not None:
                    return message
                if self._drained and time.monotonic() >= deadline:
                    self._drained = False  # the next call reads again
                    break
                if not self._fill(deadline):
                    break
        return None

    def _got(self, count: int) -> None:
        with self._acknowledged:
            super()._got(count)
            self._acknowledged.notify_all()

    @property
    def elsewhere(self) -> tuple[str, int] | None:
        return (self._stood_by.host, self._stood_by.port) if self._stood_by.host else None

    @property
    def sent(self) -> int:
        return self._kept.count

    def has_got(self, count: int, timeout_s: float = 0.0) -> bool:
        with self._acknowledged:
            return self._acknowledged.wait_for(lambda: self._kept.dropped >= count, timeout_s)

    def _is_news(self, message: object) -> bool:
        if isinstance(message, Got):
            with self._sending:
                return super()._is_news(message)
        return super()._is_news(message)

    def give_up(self, why: str, unheard: int = 0, only_silent: bool = False) -> None:
        with self._sending:  # or resume, in another thread, could make a new connection meanwhile
            last = self._last_word()
            silent = self._is_host_silent
            heard = self._kept.count - self._kept.dropped < unheard or (only_silent and not silent)
            if self.broken is None and last is not None and not heard:
                self._add(encode(last))
                self._push(0.0)
                self._break(Disconnected(why, silent=silent))

    def bear_silence(self, silent_s: float) -> None:
        pass

    def close(self) -> None:
        self._break(Disconnected("it was closed on this side"))
        with self._sending, self._receiving:  # the waiting threads have been woken
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
            except OSError as error:  # what came before is still to be read, and then the reader finds the end
                self._mute, self._reset = True, is_reset(error)
                self._unsent.clear()
                self._shut()
        return not self._unsent or self.broken is not None

    def _overdue(self, timeout_s: float) -> bool:
        if timeout_s:
            self._break(Disconnected(f"the other end has read nothing for {timeout_s:g} s"))
        elif len(self._unsent) > UNSENT and not self._holds_all:
            self._break(Disconnected(f"the other end reads nothing, and {len(self._unsent)} bytes wait for it"))
        return False

    def _fill(self, deadline: float) -> bool:
        """Read available bytes, or wait for some. Return False if the deadline has passed."""
        try:
            data = self._read()
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            self._await(select.POLLIN, deadline)
        except OSError as error:
            why = error.strerror or str(error)
            self._break(Disconnected(why, silent=is_silence(error), reset=is_reset(error)))
        else:
            if data:
                self._frames.feed(data)
            else:
                why = "the other end is gone" + ", in the middle of a message" * self._frames.broken_off
                self._break(Disconnected(why, reset=self._reset))
        return True

    def _break(self, why: Disconnected) -> None:
        if self.broken is None:
            self.broken = why
        self._shut()

    def _await(self, what: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self.fileno(), what)
        poll.poll(max(1.0, (deadline - time.monotonic()) * 1000))

    def fileno(self) -> int:
        raise NotImplementedError

    def _write(self, data: bytearray) -> int:
        raise NotImplementedError

    def _read(self) -> bytes:
        """Return the bytes that have come; empty at the end."""
        raise NotImplementedError

    def _shut(self) -> None:
        """Wake all that wait, at both ends. Bytes that have come can still be read, then follows the end."""

    @property
    def _is_host_silent(self) -> bool:
        """Whether the other end's host is silent; the caller holds ``_sending``."""
        return False

    def _release(self) -> None:
        """Close the descriptors, once no thread uses them. May be called again."""
