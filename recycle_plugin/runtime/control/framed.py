"""The connections that carry the messages of core/messages/protocol.py: the port, and what all implementations share.

A worker's threads wait in ``send`` and ``receive``, each with a deadline.  The event loops of the coordinator and of
the supervisors wait for nobody: there a connection is in an InLoop (in_loop.py).  Both implementations, over sockets
(connections.py) and within a process (in_process.py), carry the same frames (core/messages/encoding.py), so malformed
bytes are dealt with in one place.
"""

from __future__ import annotations

import select
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from recycle_plugin.authentication.datagrams import SealedDatagrams
from recycle_plugin.authentication.handshake import SEAL, Seals
from recycle_plugin.core.messages.encoding import LIMIT, Frames, encode
from recycle_plugin.core.messages.from_coordinator import Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.line_end import LineEnd
from recycle_plugin.core.messages.mirroring import Got
from recycle_plugin.core.messages.typed import Unreadable

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
    def elsewhere(self) -> tuple[str, int] | None:
        """Where the last one listens that has stood by on another host, as far as this end knows; None where nobody
        has.
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
    def held_up(self) -> bool:
        """Whether something was sent that the other end's host has not acknowledged; also while the connection is
        broken.  False within a process.
        """

    @property
    def sent(self) -> int:
        """How many messages this end has sent since it was welcomed."""

    @property
    def unheard(self) -> int:
        """How many of these the other end has not said it has."""

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


class Framed(LineEnd):
    """What both implementations have in common: messages in, frames out.

    Subclasses move bytes, as non-blocking sockets do.  With ``seals`` every frame has one behind it.
    """

    def __init__(self, limit: int, seals: Seals | None = None) -> None:
        super().__init__()
        self._limit = limit
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._acknowledged = threading.Condition()
        self._begin(seals)

    def _begin(self, seals: Seals | None) -> None:
        self._seals, self._unsent, self._mute = seals, bytearray(), False
        self._frames = Frames(self._limit) if seals is None else Frames(self._limit, SEAL, seals.into.fits)
        self.datagrams = None if seals is None else SealedDatagrams(seals.datagrams)
        self.broken: Disconnected | None = None

    def _go_on(self, fresh: Framed, welcome: Welcome) -> None:
        """Go on with what a ``fresh`` connection has, whose answer is ``welcome``; call it under both locks."""
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
            super()._got(count)
            self._acknowledged.notify_all()

    @property
    def elsewhere(self) -> tuple[str, int] | None:
        return (self._stood_by.host, self._stood_by.port) if self._stood_by.host else None

    @property
    def sent(self) -> int:
        return self._kept.count

    @property
    def unheard(self) -> int:
        return self._kept.count - self._kept.dropped

    def has_got(self, count: int, timeout_s: float = 0.0) -> bool:
        with self._acknowledged:
            return self._acknowledged.wait_for(lambda: self._kept.dropped >= count, timeout_s)

    def _is_news(self, message: object) -> bool:
        if isinstance(message, Got):
            with self._sending:
                return super()._is_news(message)
        return super()._is_news(message)

    def give_up(self, why: str) -> None:
        if (last := self._last_word()) is not None:
            self.send(last)
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
