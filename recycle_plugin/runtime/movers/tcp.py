"""The mover between hosts (runtime/movers/mover.py): tagged messages over TCP.

Shapes and dtypes travel with the tensors, so they may change from step to step.  Tensors of an accelerator pass through
host memory: whoever sends has started the copy, and the thread that writes waits for it.

On a machine whose cores are busy every change of thread costs milliseconds, so there are as few as
can be: the worker itself writes to the socket what that takes at once (a thread has the rest), and
each sender's thread reads straight into the tensor's memory.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from recycle_plugin.core.messages.encoding import HEAD, Language
from recycle_plugin.core.messages.from_workers import Missing
from recycle_plugin.core.messages.typed import Unreadable
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.port import Copy, Device, Tensors
from recycle_plugin.runtime.movers.mover import OF_REPLAYS
from recycle_plugin.runtime.processes import forked
from recycle_plugin.runtime.processes.accepting import NO_ROOM, PAUSE_S, Refusals

T = TypeVar("T")
LONGEST_HEADER = 1 << 20  # bytes; what says more is none of ours
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
CONNECT_S = 10.0  # how long a peer's listener, or this worker's own, may take to answer
HELLO_S = 60.0  # how long who has connected may take to say who it is
DEATH_S = 1.0  # how long the news may take that a peer whose connection broke is dead
LINGER_S = 1.0  # how long what live peers still have to get may take


@dataclass(frozen=True)
class Sender:
    """The first message on a connection: the address of its sender."""

    address: str


@dataclass(frozen=True)
class Header:
    """What comes before the bytes of a datum's tensors: the dtype and shape of each."""

    datum: Datum
    valid_from: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


LANGUAGE = Language((Sender, Header))


class Nonsense(ValueError):
    """Something has arrived that is not the transport's; the message says what is wrong with it."""


class Transport:
    """The mover over TCP: one inbox of this worker and one outbox for each peer.

    ``device``: the one on which arriving tensors will be used.
    """

    def __init__(self, session: Session, device: Device) -> None:
        self._session, self._device = session, device
        self._failure: RecycleError | None = None  # of a copy
        self._arrived: deque[tuple[Datum, Tensors, int]] = deque()
        self._outboxes: dict[str, Outbox] = {}
        self._listener = forked.own(socket.create_server(("", 0), backlog=1024))
        self._accepted: set[socket.socket] = set()
        self._closed = threading.Event()
        self._refusals = Refusals(lambda text: session.note("warning", f"at worker {session.rank} {text}"))
        self._said_nonsense = False
        self._readers: dict[
            threading.Thread, str
        ] = {}  # with the address of whose messages each reads, once that is said
        self._heard: frozenset[str] | None = None  # from these only, if that is said
        self._knocked: tuple[str, int] | None = None  # at this worker's own door, and not yet let in
        self.address = f"tcp://{session.own_address}:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, name="recycle: transport", daemon=True)
        self._accepting.start()

    def send(self, address: str, datum: Datum, tensors: Copy, valid_from: int) -> None:
        """Send a datum to a peer without blocking; see Mover.send.  Raises the RecycleError of a copy that failed
        before.
        """
        self._check()
        if address not in self._outboxes:
            self._outboxes[address] = Outbox(address, self.address, self._broke, self._emptied, self._failed)
        self._outboxes[address].send(Message(datum, valid_from, tensors, self._session.wait_timeout_s))

    def arrivals(self) -> Iterator[tuple[Datum, Tensors, int]]:
        """What has come since this was asked last: datum, tensors, and the generation from which they are valid."""
        self._check()
        while self._arrived:
            yield self._arrived.popleft()

    def wait_sent(self, addresses: Iterable[str]) -> None:
        """Return when the sockets to these peers have taken all that is for them, or the peers are gone; see
        Mover.wait_sent.
        """

        def taken() -> bool | None:
            self._check()
            return None if any(outbox.backlog for outbox in outboxes) else True

        outboxes = [self._outboxes[address] for address in addresses if address in self._outboxes]
        self._session.wait("a peer to take what is sent to it", taken)

    def hears(self) -> bool:
        """Whether this worker's own listener lets peers in; it connects to it, and waits up to 10 s."""
        if not self._knock():
            return False
        with self._session.changed:
            return self._session.changed.wait_for(lambda: self._knocked is None, CONNECT_S)

    def hear_out(self, peers: Collection[str]) -> bool:
        """Take what peers other than ``peers`` have sent before they went, waiting up to 1 s, and nothing of theirs
        after.
        """
        live, could_knock = frozenset(peers), self._knock()
        with (
            self._session.changed
        ):  # a process that has ended has closed its connections, so this takes long only where a host is gone
            self._session.changed.wait_for(
                lambda: self._knocked is None and live.issuperset(self._readers.values()), DEATH_S
            )
            self._heard = live
            return could_knock and self._knocked is None

    def _knock(self) -> bool:
        """Connect to this worker's own listener: who came before, and has perhaps sent and died since, is let in first.

        False where that can't be, for want of a descriptor as may be; then whoever is in is heard out.
        """
        try:
            with socket.socket(self._listener.family) as knocking:
                knocking.settimeout(DEATH_S)
                knocking.bind((self._session.own_address, 0))
                self._knocked = knocking.getsockname()
                knocking.connect((self._session.own_address, self._listener.getsockname()[1]))
        except OSError:
            self._knocked = None
            return False
        return True

    def keep_only(self, members: Iterable[str]) -> None:
        """Send nothing more to anybody but ``members``; broken connections to these are made anew."""
        peers = set(members)
        with self._session.changed:
            if self._heard is not None:  # who has come back meanwhile is heard from now on
                self._heard |= peers
        for address in [address for address, outbox in self._outboxes.items() if address not in peers or outbox.broken]:
            self._outboxes.pop(address).close(linger_s=0)

    def _broke(self, address: str, error: OSError | None) -> None:
        """Note that the connection to a peer has broken.

        Most often the peer is dead, and the coordinator says so within moments; for want of room here, this worker is
        at fault itself.
        """
        what, at = "a connection", address
        if error is not None and error.errno in NO_ROOM:
            what, at = f"a connection ({error.strerror})", self.address
        timer = threading.Timer(DEATH_S, self._say_broken, (at, what, self._session.number))
        timer.daemon = True
        timer.start()

    def _say_broken(self, address: str, what: str, generation: int) -> None:
        session = self._session
        peer = session.roster.at(address)
        if (
            peer is not None
            and not self._closed.is_set()
            and session.number == generation
            and session.interruption() is None
        ):
            session.send(Missing(session.rank, generation, what, str(peer.seat)))

    def _failed(self, error: RecycleError) -> None:
        """Note that a copy of what was to be sent has failed: the thread that trains has to know."""
        with self._session.changed:
            self._failure = error
            self._session.changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop receiving; what is under way to live peers still gets there, within a second."""
        deadline = time.monotonic() + LINGER_S
        for outbox in self._outboxes.values():
            outbox.close(max(0.0, deadline - time.monotonic()))
        self._outboxes.clear()
        self._closed.set()
        end(self._listener)
        self._accepting.join(LINGER_S)
        self._listener.close()
        for connection in list(self._accepted):
            end(connection)
        for reader in list(self._readers):
            reader.join(LINGER_S)

    # --- receiving ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, peer = self._listener.accept()
                self._let_in(connection, peer)
            except OSError as error:
                if not self._closed.is_set():
                    self._closed.wait(self._refusals.pause_s(error))

    def _let_in(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        self._accepted.add(forked.own(connection))
        reader = threading.Thread(target=self._read, args=(connection, peer), name="recycle: transport", daemon=True)
        with self._session.changed:
            self._readers[reader] = ""
            self._knocked = None if peer == self._knocked else self._knocked
        try:
            reader.start()
        except (
            RuntimeError
        ):  # there is no room for another thread: the peer finds its connection broken, and comes again
            self._let_go(connection, reader)
            raise OSError(errno.EAGAIN, "no thread") from None

    def _let_go(self, connection: socket.socket, reader: threading.Thread) -> None:
        self._accepted.discard(connection)
        connection.close()
        with self._session.changed:
            del self._readers[reader]
            self._session.changed.notify_all()

    def _read(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        """Deliver one peer's messages until it closes, breaks off in the middle of one, or says what is none."""
        reader = threading.current_thread()
        try:
            connection.settimeout(HELLO_S)
            sender = _receive_header(connection, Sender).address
            connection.settimeout(None)
            with self._session.changed:
                self._readers[reader] = sender
                self._session.changed.notify_all()
            while True:
                header = _receive_header(connection, Header)
                tensors = tuple(self._receive_tensor(connection, dtype, shape) for dtype, shape in header.tensors)
                self._deliver(sender, header.datum, header.valid_from, tensors)
        except Nonsense as nonsense:
            self._say_nonsense(peer, nonsense)
        except (OSError, EOFError):
            pass
        self._let_go(connection, reader)

    def _say_nonsense(self, peer: tuple[str, int], nonsense: Nonsense) -> None:
        """Warn of nonsense once: a scanner of ports comes more often."""
        if not self._said_nonsense:
            self._said_nonsense = True
            self._session.note(
                "warning",
                f"at worker {self._session.rank} a connection from {peer[0]}:{peer[1]} says what can't be understood: "
                f"{nonsense}",
            )

    def _receive_tensor(self, connection: socket.socket, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        if dtype not in DTYPES:
            raise Nonsense(f"a tensor of {dtype[:80]!r}, which is no type")
        try:
            tensor = self._device.room(shape, DTYPES[dtype])
            target = _bytes(tensor) if tensor.numel() else memoryview(b"")
        except (
            RuntimeError,
            TypeError,
            OverflowError,
            MemoryError,
        ) as error:  # torch's own words on a shape that can't be, or on one for which there is no room
            raise Nonsense(f"a tensor of shape {str(shape)[:80]}: {str(error)[:200]}") from None
        fill(connection, target)
        return tensor

    def _deliver(self, sender: str, datum: Datum, valid_from: int, tensors: Tensors) -> None:
        with self._session.changed:
            if self._heard is None or sender in self._heard or datum.kind == OF_REPLAYS:
                self._arrived.append((datum, tensors, valid_from))
                self._session.changed.notify_all()

    def _emptied(self) -> None:
        with self._session.changed:
            self._session.changed.notify_all()


class Message(NamedTuple):
    """One datum to send; its ``tensors`` may still be on their way to host memory, for at most ``timeout_s``
    seconds.
    """

    datum: Datum
    valid_from: int
    tensors: Copy
    timeout_s: float

    def parts(self) -> list[memoryview]:
        """The pieces of memory that are written to the socket: the header, and each tensor's bytes."""
        tensors = self.tensors.wait(self.timeout_s)
        shapes = tuple((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors)
        return [
            memoryview(LANGUAGE.encode(Header(self.datum, self.valid_from, shapes))),
            *(_bytes(tensor) for tensor in tensors if tensor.numel()),
        ]


class Outbox:
    """The queue of messages to one peer.

    What the socket does not take at once, or is not in host memory yet, waits for a thread, so that no sender ever
    does.  A peer that cannot be reached any more is the coordinator's business: what was for it is dropped.

    ``own`` is the sender's address.  ``tell(address, error)`` is called once when the connection breaks, with what was
    wrong if that is known; ``emptied`` when nothing waits any more; ``failed`` with the error where something can't be
    sent.
    """

    def __init__(
        self,
        address: str,
        own: str,
        tell: Callable[[str, OSError | None], None],
        emptied: Callable[[], None],
        failed: Callable[[RecycleError], None],
    ) -> None:
        self._address, self._own, self._tell, self._emptied, self._failed = address, own, tell, emptied, failed
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._peer = (host, int(port))
        self._changed = threading.Condition()
        self._waiting: deque[Message | list[memoryview]] = deque()  # the latter, of one: what is left of it
        self._connection: socket.socket | None = None
        self.broken = False
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="recycle: transport", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> bool:
        """Whether something waits, for a peer that may still take it."""
        return bool(self._waiting) and not self.broken

    def send(self, message: Message) -> None:
        """Send a message now as far as the socket takes it, and queue the rest; it never blocks."""
        with self._changed:
            rest: Message | list[memoryview] = message
            if self._connection is not None and not self._waiting and message.tensors.poll():
                rest = self._send_now(self._parts(message))
            if rest and not self.broken:
                self._waiting.append(rest)
                self._changed.notify()

    def close(self, linger_s: float) -> None:
        """Close the connection, after what is waiting has gone out if that takes no longer than ``linger_s``
        seconds.
        """
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: self.broken or not self._waiting, linger_s)
            self._break_off()
            if self._connection is not None:
                end(self._connection)

    def _send_now(self, parts: list[memoryview]) -> list[memoryview]:
        """Write what the socket takes at once; returns what is left."""
        assert self._connection is not None, "nothing is sent before there is a connection"
        try:
            while parts:
                sent = self._connection.sendmsg(parts, [], socket.MSG_DONTWAIT)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._break_off()
        return parts

    def _work(self) -> None:
        """Connect, then send what could not go at once."""
        try:
            connection = forked.own(self._connected())
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(LANGUAGE.encode(Sender(self._own)))
        except OSError as error:
            with self._changed:
                self._break_off(error)
            self._emptied()
            return
        with connection:
            with self._changed:
                self._connection = connection
            while (waiting := self._next()) is not None:
                try:
                    for part in self._parts(waiting):
                        connection.sendall(part)
                except OSError:
                    waiting = None
                with self._changed:
                    self._waiting.popleft() if waiting is not None and self._waiting else self._break_off()
                    self._changed.notify_all()
                if not self._waiting:
                    self._emptied()

    def _connected(self) -> socket.socket:
        """A connection to the peer; where there is no room for one here, it is tried again for a while."""
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return socket.create_connection(self._peer, CONNECT_S)
            except OSError as error:
                if error.errno not in NO_ROOM or self._closing or time.monotonic() >= deadline:
                    raise
            with self._changed:
                self._changed.wait_for(lambda: self._closing, PAUSE_S)

    def _parts(self, waiting: Message | list[memoryview]) -> list[memoryview]:
        """The pieces of a message, once it is on the host.

        Where it does not get there, nothing comes behind it, and nobody is told that the peer is at fault.
        """
        if not isinstance(waiting, Message):
            return waiting
        try:
            return waiting.parts()
        except Exception as error:  # handed to the thread that trains, whatever it is
            with self._changed:
                self._closing = True
                self._break_off()
            self._failed(RecycleError(f"{waiting.datum} could not be sent: {error}"))
            return []

    def _next(self) -> Message | list[memoryview] | None:
        """What is to be sent next; it stays in the queue meanwhile, so that nothing overtakes it."""
        with self._changed:
            self._changed.wait_for(lambda: self.broken or self._waiting)
            return None if self.broken else self._waiting[0]

    def _break_off(self, error: OSError | None = None) -> None:
        if not self.broken and not self._closing:
            self._tell(self._address, error)
        self.broken = True
        self._waiting.clear()
        self._changed.notify_all()


def _receive_header(connection: socket.socket, kind: type[T]) -> T:
    """Read a header; raises Nonsense where something else comes."""
    size = LANGUAGE.size(exactly(connection, HEAD.size), LONGEST_HEADER)
    header = size if isinstance(size, Unreadable) else LANGUAGE.message(bytes(exactly(connection, size)))
    if not isinstance(header, kind):
        raise Nonsense(str(header)[:200])
    return header


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host that has elements."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def exactly(connection: socket.socket, length: int) -> bytearray:
    """Exactly ``length`` bytes; EOFError when the peer closes first."""
    received = bytearray(length)
    fill(connection, memoryview(received))
    return received


def fill(connection: socket.socket, target: memoryview) -> None:
    """Read into all of ``target``; EOFError when the peer closes first."""
    while target:
        received = connection.recv_into(target, 0, socket.MSG_WAITALL)
        if not received:
            raise EOFError
        target = target[received:]


def end(connection: socket.socket) -> None:
    """Shut a connection, which wakes whoever is blocked on it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected any more, or closed
        pass
