"""The bytes on a line: messages of a Language, each with its seal. Some are followed by unsealed bytes."""

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
    """Bytes that are no message of the line; the error's text tells what is wrong."""


class Framing:
    """The frames of the messages of ``language``."""

    def __init__(self, language: Language) -> None:
        self._language = language

    def frame(self, message: object, seal: Seal) -> bytes:
        """Return the bytes of the next message, followed by their ``seal``."""
        made = self._language.encode(message)
        return made + seal.of(made)

    def receive(self, connection: Connection, kind: type[T], seal: Seal, limit: int = LIMIT) -> T:
        """Return the next message, of this ``kind``. Raises Nonsense if it is of another kind, EOFError at the end,
        OSError.
        """
        head = exactly(connection, HEAD.size)
        rest = exactly(connection, self._size(head, limit) + SEAL)
        message = self._message(bytes(head + rest[:-SEAL]), bytes(rest[-SEAL:]), seal)
        if not isinstance(message, kind):
            raise Nonsense(f"a {type(message).__name__} where it should be a {kind.__name__}")
        return message

    def taken(self, received: bytearray, seal: Seal) -> object | None:
        """Remove and return ``received``'s first message; None until it is whole. Raises Nonsense for a wrong seal."""
        if len(received) < HEAD.size:
            return None
        end = HEAD.size + self._size(received, LIMIT)
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
    """Return exactly ``length`` bytes. Raises EOFError if the other end closes first, OSError."""
    received = bytearray(length)
    fill(connection, memoryview(received))
    return received


def fill(connection: Connection, target: memoryview) -> None:
    """Read into all of ``target``. Raises EOFError if the other end closes first, OSError."""
    while target:
        received = connection.recv_into(target, 0, socket.MSG_WAITALL)
        if not received:
            raise EOFError("the other end is gone")
        target = target[received:]


def end(connection: Connection) -> None:
    """Shut down a connection or a listener, which wakes any thread blocked on it."""
    with suppress(OSError):  # not connected any more, or closed
        connection.shutdown(socket.SHUT_RDWR)


def peer_at(address: str) -> tuple[str, int]:
    """Return host and port of an ``address`` ("tcp://host:port")."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def proved(connection: socket.socket, secret: Secret, port: Port, answer_s: float) -> Proved:
    """Return the line over a ``connection`` to such a ``port`` once both ends have proved who they are, each within
    ``answer_s`` seconds. The line has no timeout. Raises OSError.
    """
    line = call(connection, secret, port, answer_s)
    line.connection.settimeout(None)
    line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line
