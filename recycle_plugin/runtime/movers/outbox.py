"""The messages to one peer over TCP (runtime/movers/tcp.py): a queue, and a thread for what cannot go at once."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from recycle_plugin.authentication.handshake import Port, Seal
from recycle_plugin.authentication.secret import Secret
from recycle_plugin.authentication.tls_socket import Connection
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.port import Copy
from recycle_plugin.runtime.lines.frames import end, peer_at, proved
from recycle_plugin.runtime.movers.wire import FRAMES, Header, Sender, raw, shapes_of
from recycle_plugin.runtime.system import forked
from recycle_plugin.runtime.system.accepting import NO_ROOM, PAUSE_S

CONNECT_S = 10.0  # to reach a peer's listener
HELLO_S = 60.0  # for the peer's handshake; it may be stopped for a while


class Identity(NamedTuple):
    """The sender's identity: the job's secret, and its own address."""

    secret: Secret
    address: str


class Message(NamedTuple):
    """One datum to send; its ``tensors`` may still be on their way to host memory, for up to ``timeout_s`` seconds."""

    datum: Datum
    valid_from: int
    tensors: Copy
    timeout_s: float

    def parts(self, seal: Seal) -> list[memoryview]:
        """Return the memory to write: the header with its ``seal``, and each tensor's bytes."""
        tensors = self.tensors.wait(self.timeout_s)
        return [
            memoryview(FRAMES.frame(Header(self.datum, self.valid_from, shapes_of(tensors)), seal)),
            *[raw(tensor) for tensor in tensors if tensor.numel()],
        ]

    def poll(self) -> bool:
        """Return whether its tensors are in host memory."""
        return self.tensors.poll()

    def __str__(self) -> str:
        return str(self.datum)


class Word(NamedTuple):
    """A ``message`` without tensors."""

    message: object

    def parts(self, seal: Seal) -> list[memoryview]:
        return [memoryview(FRAMES.frame(self.message, seal))]

    def poll(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True


class Outbox:
    """The queue of messages to one peer.

    Messages that the socket does not take at once, or that are not in host memory yet, wait for a thread, so no sender
    ever blocks. Messages for an unreachable peer are dropped: losses are the coordinator's business.

    ``own``: the sender. ``tell(address, error)``: called once when the connection breaks, with the error if it is
    known. ``emptied``: called when nothing waits any more. ``failed``: called with the error if something cannot be
    sent.
    """

    def __init__(
        self,
        address: str,
        own: Identity,
        tell: Callable[[str, OSError | None], None],
        emptied: Callable[[], None],
        failed: Callable[[RecycleError], None],
    ) -> None:
        self._address, self._own, self._tell, self._emptied, self._failed = address, own, tell, emptied, failed
        self._peer = peer_at(address)
        self._changed = threading.Condition()
        self._waiting: deque[Message | Word | list[memoryview]] = deque()  # a list: the rest of one message
        self._opening: socket.socket | None = None  # a connection before its handshake
        self._connection: Connection | None = None
        self._seal: Seal  # for sending, once connected
        self.broken = False
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="recycle: transport", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> bool:
        """Whether something waits for a peer that may still take it."""
        return bool(self._waiting) and not self.broken

    def send(self, message: Message | Word) -> None:
        """Send as much of a message as the socket takes now, and queue the rest; never blocks."""
        with self._changed:
            rest: Message | Word | list[memoryview] = message
            if self._connection is not None and not self._waiting and message.poll():
                rest = self._send_now(self._parts(message))
            if rest and not self.broken:
                self._waiting.append(rest)
                self._changed.notify()

    def close(self, linger_s: float) -> None:
        """Close the connection, after waiting up to ``linger_s`` seconds for queued messages to go out."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: self.broken or not self._waiting, linger_s)
            self._break_off()
            if self._opening is not None:
                end(self._opening)

    def _send_now(self, parts: list[memoryview]) -> list[memoryview]:
        """Write as much as the socket takes at once; return the rest."""
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
        try:
            connection = self._opened()
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

    def _opened(self) -> Connection:
        """Return a connection on which both ends are authenticated; raises OSError."""
        connection = self._opening = forked.own(self._connected())
        try:
            if self._closing:
                raise ConnectionAbortedError
            over, seals = proved(connection, self._own.secret, Port.TENSORS, HELLO_S)
            self._seal = seals.out
            over.sendall(FRAMES.frame(Sender(self._own.address), self._seal))
        except OSError:
            connection.close()
            raise
        return over

    def _connected(self) -> socket.socket:
        """Connect to the peer. If this host has no room for a connection, retry for up to CONNECT_S."""
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return socket.create_connection(self._peer, CONNECT_S)
            except OSError as error:
                if error.errno not in NO_ROOM or self._closing or time.monotonic() >= deadline:
                    raise
            with self._changed:
                self._changed.wait_for(lambda: self._closing, PAUSE_S)

    def _parts(self, waiting: Message | Word | list[memoryview]) -> list[memoryview]:
        """Return the pieces of a message, once on the host. If that fails nothing follows, and no peer is blamed."""
        if isinstance(waiting, list):
            return waiting
        try:
            return waiting.parts(self._seal)
        except Exception as error:  # any error goes to the training thread
            with self._changed:
                self._closing = True
                self._break_off()
            self._failed(RecycleError(f"{waiting} could not be sent: {error}"))
            return []

    def _next(self) -> Message | Word | list[memoryview] | None:
        """Return the next message; it stays in the queue meanwhile, so that nothing overtakes it."""
        with self._changed:
            self._changed.wait_for(lambda: self.broken or self._waiting)
            return None if self.broken else self._waiting[0]

    def _break_off(self, error: OSError | None = None) -> None:
        if not self.broken and not self._closing:
            self._tell(self._address, error)
        self.broken = True
        self._waiting.clear()
        self._changed.notify_all()
