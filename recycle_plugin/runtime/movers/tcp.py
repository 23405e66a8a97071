"""The mover between hosts (runtime/movers/mover.py): tagged messages over TCP.

Shapes and dtypes travel with the tensors, so they may change from step to step. An accelerator's tensors pass through
host memory: the sender has started the copy, and the writing thread waits for it.

On a machine with busy cores every thread switch costs milliseconds, so there are few. The worker itself writes what the
socket takes at once, a thread writes the rest, and each sender's thread reads straight into the tensors' memory.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import partial

import torch

from recycle_plugin.authentication.door import Door
from recycle_plugin.authentication.handshake import Port, Proved
from recycle_plugin.authentication.tls_socket import Connection
from recycle_plugin.core.messages.from_workers import Missing
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.port import Copy, Device, Tensors
from recycle_plugin.runtime.lines.frames import Nonsense, fill
from recycle_plugin.runtime.lines.listener import Listener
from recycle_plugin.runtime.movers.mover import OF_REPLAYS
from recycle_plugin.runtime.movers.outbox import CONNECT_S, HELLO_S, Identity, Message, Outbox
from recycle_plugin.runtime.movers.wire import FRAMES, LONGEST_HEADER, Header, Sender, dtype_of, raw
from recycle_plugin.runtime.system.accepting import NO_ROOM

DEATH_S = 1.0  # for the news that a peer with a broken connection is dead
LINGER_S = 1.0  # for data that live peers still have to get


class Transport:
    """The mover over TCP: this worker's inbox, and one outbox per peer.

    ``device``: where arriving tensors will be used. ``hear(sender, message)`` handles messages other than tensor
    headers, in that sender's thread; it raises Nonsense for invalid ones.
    """

    def __init__(self, session: Session, device: Device) -> None:
        self._session, self._device, self.hear = session, device, _refuse
        self._failure: RecycleError | None = None  # of a copy
        self._arrived: deque[tuple[Datum, Tensors, int]] = deque()
        self._outboxes: dict[str, Outbox] = {}
        self._peers = threading.Lock()  # guards _outboxes
        self._closed = threading.Event()
        # {connection: its sender's address, "" before that is known}
        self._readers: dict[socket.socket, str] = {}
        self._heard: frozenset[str] | None = None  # the only senders still heard; None: all
        self._knocked: tuple[str, int] | None = None  # this worker's connection to its own listener, not yet let in
        door = Door(session.secret, Port.TENSORS, f"at worker {session.rank}", session.note_stranger)
        note = partial(session.note, "warning")
        self._listener = Listener(
            session.own_address, door, "transport", note, self._read, HELLO_S, self._comes, self._goes
        )
        self.address = self._listener.address

    def send(self, address: str, datum: Datum, tensors: Copy, valid_from: int) -> None:
        """Send a datum to a peer without blocking; see Mover.send. Raises the error of an earlier copy that failed."""
        self.check()
        self.outbox(address).send(Message(datum, valid_from, tensors, self._session.waiting.timeout_s))

    def outbox(self, address: str) -> Outbox:
        with self._peers:
            if address not in self._outboxes:
                own = Identity(self._session.secret, self.address)
                self._outboxes[address] = Outbox(address, own, self._broke, self._session.waiting.wake, self.failed)
            return self._outboxes[address]

    def arrivals(self) -> Iterator[tuple[Datum, Tensors, int]]:
        self.check()
        while self._arrived:
            yield self._arrived.popleft()

    def wait_sent(self, addresses: Iterable[str]) -> None:
        """Return when the sockets to these peers have taken everything, or the peers are gone; see Mover.wait_sent."""

        def taken() -> bool | None:
            self.check()
            return None if any(outbox.backlog for outbox in outboxes) else True

        outboxes = [self._outboxes[address] for address in addresses if address in self._outboxes]
        self._session.waiting.until("a peer to take what is sent to it", taken)

    def hears(self) -> bool:
        """Return whether this worker's own listener lets peers in: connects to it, and waits up to 10 s."""
        if not self._knock():
            return False
        with self._session.waiting.changed:
            return self._session.waiting.changed.wait_for(lambda: self._knocked is None, CONNECT_S)

    def hear_out(self, peers: Collection[str]) -> bool:
        """Receive all that peers other than ``peers`` have sent, waiting up to 1 s, and accept nothing more from them
        afterwards. A second call does not wait again for the same peers.
        """
        live, could_knock = frozenset(peers), self._knock()
        out = frozenset() if self._heard is None else frozenset(self._readers.values()) - self._heard

        def heard() -> bool:
            return self._knocked is None and (live | out).issuperset(self._readers.values())

        # an ended process has closed its connections, so this takes long only if a host is gone
        with self._session.waiting.changed:
            self._session.waiting.changed.wait_for(heard, DEATH_S)
            self._heard = live
            return could_knock and self._knocked is None

    def listen_to(self, peers: Iterable[str]) -> None:
        with self._session.waiting.changed:
            if self._heard is not None:
                self._heard |= set(peers)

    def _knock(self) -> bool:
        """Connect to this worker's own listener: earlier callers, which may have sent and died since, are let in first.

        Returns False if that is impossible, for example without a free descriptor; then only connected peers are heard
        out.
        """
        try:
            with socket.socket(self._listener.family) as knocking:
                knocking.settimeout(DEATH_S)
                knocking.bind((self._session.own_address, 0))
                self._knocked = knocking.getsockname()
                knocking.connect((self._session.own_address, self._listener.port))
        except OSError:
            self._knocked = None
            return False
        return True

    def keep_only(self, members: Iterable[str]) -> None:
        peers = set(members)
        with self._peers:
            left = [address for address, outbox in self._outboxes.items() if address not in peers or outbox.broken]
            gone = [self._outboxes.pop(address) for address in left]
        for outbox in gone:
            outbox.close(linger_s=0)

    def _broke(self, address: str, error: OSError | None) -> None:
        """Handle a broken connection to a peer. Usually the peer is dead, and the coordinator says so within moments.
        If this host had no room, this worker is at fault.
        """
        what, at = "a connection", address
        if error is not None and error.errno in NO_ROOM:
            what, at = f"a connection ({error.strerror})", self.address
        timer = threading.Timer(DEATH_S, self.say_broken, (at, what, self._session.view.number))
        timer.daemon = True
        timer.start()

    def say_broken(self, address: str, what: str, generation: int) -> None:
        """Report ``what`` between this worker and the one at ``address``, if ``generation`` is still in force."""
        session = self._session
        peer = session.view.roster.at(address)
        if (
            peer is not None
            and not self._closed.is_set()
            and session.view.number == generation
            and session.view.interruption() is None
        ):
            session.send(Missing(session.rank, generation, what, str(peer.seat)))

    def failed(self, error: RecycleError) -> None:
        """Record that a copy of data to send has failed, for the training thread."""
        with self._session.waiting.changed:
            self._failure = error
            self._session.waiting.changed.notify_all()

    def check(self) -> None:
        """Raise the error of a failed copy, if there is one."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        deadline = time.monotonic() + LINGER_S
        with self._peers:
            outboxes = [*self._outboxes.values()]
            self._outboxes.clear()
        for outbox in outboxes:
            outbox.close(max(0.0, deadline - time.monotonic()))
        self._closed.set()
        self._listener.close()

    # --- receiving ---------------------------------------------------------------------------------

    def _comes(self, connection: socket.socket, peer: tuple[str, int]) -> bool:
        """Record a connection, in order of arrival; returns False for this worker's own knock."""
        with self._session.waiting.changed:
            knocks = peer == self._knocked
            if knocks:
                self._knocked = None
            else:
                self._readers[connection] = ""
            self._session.waiting.changed.notify_all()
        return not knocks

    def _goes(self, connection: socket.socket) -> None:
        with self._session.waiting.changed:
            self._readers.pop(connection, None)
            self._session.waiting.changed.notify_all()

    def _read(self, own: socket.socket, proved: Proved) -> None:
        """Deliver one peer's messages until it closes, breaks off inside one, or sends an invalid one."""
        connection, seal = proved.connection, proved.seals.into
        sender = FRAMES.receive(connection, Sender, seal, LONGEST_HEADER).address
        connection.settimeout(None)
        with self._session.waiting.changed:
            self._readers[own] = sender
            self._session.waiting.changed.notify_all()
        while True:
            header: object = FRAMES.receive(connection, object, seal, LONGEST_HEADER)
            if not isinstance(header, Header):
                self.hear(sender, header)
                continue
            self.check_step(header.datum)
            tensors = tuple(self._receive_tensor(connection, dtype, shape) for dtype, shape in header.tensors)
            self.deliver(sender, header.datum, header.valid_from, tensors)

    def check_step(self, datum: Datum) -> None:
        """Raise Nonsense for a datum of a step that cannot be under way."""
        if not self._session.view.may_come(datum.step):
            known = f"step {self._session.view.committed} is the last one committed, evaluation "
            raise Nonsense(f"{datum}, while {known}{self._session.view.evaluated} the last one that is over")

    def _receive_tensor(self, connection: Connection, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        kind = dtype_of(dtype)
        try:
            tensor = self._device.room(shape, kind)
            target = raw(tensor) if tensor.numel() else memoryview(b"")
        except (
            RuntimeError,
            TypeError,
            OverflowError,
            MemoryError,
        ) as error:  # torch's errors for an impossible shape, or one without room
            raise Nonsense(f"a tensor of shape {str(shape)[:80]}: {str(error)[:200]}") from None
        fill(connection, target)
        return tensor

    def has(self, datum: Datum) -> bool:
        with self._session.waiting.changed:
            return any(arrived[0] == datum for arrived in self._arrived)

    def deliver(self, sender: str, datum: Datum, valid_from: int, tensors: Tensors) -> None:
        """Hand over data from ``sender``. Data of a sender that :meth:`hear_out` has closed is dropped."""
        with self._session.waiting.changed:
            if self._heard is None or sender in self._heard or datum.kind == OF_REPLAYS:
                self._arrived.append((datum, tensors, valid_from))
                self._session.waiting.changed.notify_all()


def _refuse(sender: str, message: object) -> None:
    """Raise Nonsense: only headers are expected."""
    raise Nonsense(f"a {type(message).__name__} where it should be a {Header.__name__}")
