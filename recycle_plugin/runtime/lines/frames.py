"""What is said on a line, as bytes: messages of a Language, each with its seal; behind some come bytes without one."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TypeVar

from recycle_plugin.authentication.handshake import SEAL, Port, Proved, Seal, call
from recycle_plugin.authentication.secret import Secret
from recycle_plugin.authentication.tls_socket import Connection
from recycle_plugin.core.messages.encoding import HEAD, LIMIT, Language
from recycle_plugin.core.messages.typed import Unreadable

T = TypeVar("T")
UNSEALED = "a message that does not fit its seal: somebody on the way has changed it, or sent it again"


class Nonsense(ValueError):
    """Something has come that nobody says on such a line; the message says what is wrong with it."""


class Framing:
    """The frames of the messages of ``language``."""

    def __init__(self, language: Language) -> None:
        self._language = language

    def frame(self, message: object, seal: Seal) -> bytes:
        """The bytes of the next message, with their ``seal`` behind them."""
        made = self._language.encode(message)
        return made + seal.of(made)

    def receive(self, connection: Connection, kind: type[T], seal: Seal, limit: int = LIMIT) -> T:
        """The next message, which is of this ``kind``, and has at most ``limit`` bytes.  Raises Nonsense where
        something else comes, EOFError where the other end closes first, OSError.
        """
        head = exactly(connection, HEAD.size)
        rest = exactly(connection, self._size(head, limit) + SEAL)
        message = self._message(bytes(head + rest[:-SEAL]), bytes(rest[-SEAL:]), seal)
        if not isinstance(message, kind):
            raise Nonsense(f"a {type(message).__name__} where it should be a {kind.__name__}")
        return message

    def taken(self, received: bytearray, seal: Seal, limit: int = LIMIT) -> object | None:
        """The message at the beginning of ``received``, which is taken out of it; None while it is not whole.

        Raises Nonsense where there is none that fits the next ``seal``.
        """
        if len(received) < HEAD.size:
            return None
        end = HEAD.size + self._size(received, limit)
        if len(received) < end + SEAL:
            return None
        made, its = bytes(received[:end]), bytes(received[end : end + SEAL])
        del received[: end + SEAL]
        return self._message(made, its, seal)

    def _size(self, head: bytearray, limit: int) -> int:
        size = self._language.size(head, limit)
        if isinstance(size, Unreadable):
            raise Nonsense(str(size)[:200])
        return size

    def _message(self, made: bytes, its: bytes, seal: Seal) -> object:
        if not seal.fits(made, its):
            raise Nonsense(UNSEALED)
        message = self._language.message(made[HEAD.size :])
        if isinstance(message, Unreadable):
            raise Nonsense(str(message)[:200])
        return message


def exactly(connection: Connection, length: int) -> bytearray:
    """Exactly ``length`` bytes.  Raises EOFError where the other end closes first, OSError."""
    received = bytearray(length)
    fill(connection, memoryview(received))
    return received


def fill(connection: Connection, target: memoryview) -> None:
    """Read into all of ``target``.  Raises EOFError where the other end closes first, OSError."""
    while target:
        received = connection.recv_into(target, 0, socket.MSG_WAITALL)
        if not received:
            raise EOFError("the other end is gone")
        target = target[received:]


def end(connection: Connection) -> None:
    """Shut a connection, or a listener, which wakes whoever is blocked on it."""
    with suppress(OSError):  # not connected any more, or closed
        connection.shutdown(socket.SHUT_RDWR)


def peer_at(address: str) -> tuple[str, int]:
    """Host and port of an ``address`` ("tcp://host:port")."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def proved(connection: socket.socket, secret: Secret, port: Port, answer_s: float) -> Proved:
    """What goes on over a ``connection`` that was made to such a ``port``, once both ends have proved who they are,
    each within ``answer_s`` seconds; nothing that is said then has a deadline.  Raises OSError.
    """
    line = call(connection, secret, port, answer_s)
    line.connection.settimeout(None)
    line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line
