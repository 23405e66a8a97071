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
from collections.abc import Collection, Iterable, Iterator

import torch

from recycle_plugin.authentication.door import Door
from recycle_plugin.authentication.handshake import Port, Seal
from recycle_plugin.authentication.tls_socket import Connection
from recycle_plugin.core.messages.from_workers import Missing
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.port import Copy, Device, Tensors
from recycle_plugin.runtime.movers.mover import OF_REPLAYS
from recycle_plugin.runtime.movers.outbox import CONNECT_S, HELLO_S, Identity, Message, Outbox
from recycle_plugin.runtime.movers.wire import DTYPES, Header, Nonsense, Sender, end, fill, listening_at, raw, receive
from recycle_plugin.runtime.system import forked
from recycle_plugin.runtime.system.accepting import NO_ROOM, Refusals

DEATH_S = 1.0  # how long the news may take that a peer whose connection broke is dead
LINGER_S = 1.0  # how long what live peers still have to get may take


class Transport:
    """The mover over TCP: one inbox of this worker and one outbox for each peer.

    ``device``: the one on which arriving tensors will be used.
    """

    def __init__(self, session: Session, device: Device) -> None:
        self._session, self._device = session, device
        self._failure: RecycleError | None = None  # of a copy
        self._arrived: deque[tuple[Datum, Tensors, int]] = deque()
        self._outboxes: dict[str, Outbox] = {}
        self._listener = forked.own(listening_at(session.own_address, backlog=1024))
        self._accepted: set[socket.socket] = set()
        self._closed = threading.Event()
        self._refusals = Refusals(lambda text: session.note("warning", f"at worker {session.rank} {text}"))
        self._door = Door(session.secret, Port.TENSORS, f"at worker {session.rank}", session.note_stranger)
        self._said_nonsense = False
        # with the address of whose messages each reads, once that is said
        self._readers: dict[threading.Thread, str] = {}
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
            own = Identity(self._session.secret, self.address)
            self._outboxes[address] = Outbox(address, own, self._broke, self._emptied, self._failed)
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
        # a process that has ended has closed its connections, so this takes long only where a host is gone
        with self._session.changed:
            self._session.changed.wait_for(
                lambda: self._knocked is None and live.issuperset(self._readers.values()), DEATH_S
            )
            self._heard = live
            return could_knock and self._knocked is None

    def hear(self, peers: Iterable[str]) -> None:
        """Take from now on also what ``peers`` send, of which some have come back since others were heard out."""
        with self._session.changed:
            if self._heard is not None:
                self._heard |= set(peers)

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
            while not self._closed.is_set() and (pause_s := self._door.pause_s()):
                self._closed.wait(pause_s)
            try:
                connection, peer = self._listener.accept()
                self._let_in(connection, peer)
            except OSError as error:
                if not self._closed.is_set():
                    self._closed.wait(self._refusals.pause_s(error))

    def _let_in(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        with self._session.changed:
            knocks, self._knocked = peer == self._knocked, None if peer == self._knocked else self._knocked
            self._session.changed.notify_all()
        if knocks:
            connection.close()
            return
        self._accepted.add(forked.own(connection))
        self._door.comes(connection)
        reader = threading.Thread(target=self._read, args=(connection, peer), name="recycle: transport", daemon=True)
        with self._session.changed:
            self._readers[reader] = ""
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
        reader, proved = threading.current_thread(), self._door.lets_in(connection, peer)
        try:
            if proved is not None:
                self._read_on(proved.connection, reader, proved.seals.into)
        except Nonsense as nonsense:
            self._say_nonsense(peer, nonsense)
        except (OSError, EOFError):
            pass
        self._let_go(connection, reader)

    def _read_on(self, connection: Connection, reader: threading.Thread, seal: Seal) -> None:
        connection.settimeout(HELLO_S)
        sender = receive(connection, Sender, seal).address
        connection.settimeout(None)
        with self._session.changed:
            self._readers[reader] = sender
            self._session.changed.notify_all()
        while True:
            header = receive(connection, Header, seal)
            if not self._session.may_come(header.datum.step):
                known = f"step {self._session.committed} is the last one committed, evaluation "
                raise Nonsense(f"{header.datum}, while {known}{self._session.evaluated} the last one that is over")
            tensors = tuple(self._receive_tensor(connection, dtype, shape) for dtype, shape in header.tensors)
            self._deliver(sender, header.datum, header.valid_from, tensors)

    def _say_nonsense(self, peer: tuple[str, int], nonsense: Nonsense) -> None:
        """Warn of nonsense once: whoever says it may go on."""
        if not self._said_nonsense:
            self._said_nonsense = True
            self._session.note(
                "warning",
                f"at worker {self._session.rank} a worker of this job, at {peer[0]}:{peer[1]}, says what can't be "
                f"understood: {nonsense}",
            )

    def _receive_tensor(self, connection: Connection, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        if dtype not in DTYPES:
            raise Nonsense(f"a tensor of {dtype[:80]!r}, which is no type")
        try:
            tensor = self._device.room(shape, DTYPES[dtype])
            target = raw(tensor) if tensor.numel() else memoryview(b"")
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
