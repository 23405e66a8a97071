"""What movers say to each other over TCP, as bytes: a sealed message of LANGUAGE, and behind a Header its tensors."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from recycle_plugin.authentication.handshake import SEAL, Seal
from recycle_plugin.authentication.tls_socket import Connection
from recycle_plugin.core.messages.encoding import HEAD, Language
from recycle_plugin.core.messages.typed import Unreadable
from recycle_plugin.core.vocabulary.dataflow import Datum

T = TypeVar("T")
LONGEST_HEADER = 1 << 20  # bytes; what says more is none of ours
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


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
UNSEALED = "a message that does not fit its seal: somebody on the way has changed it, or sent it again"


class Nonsense(ValueError):
    """Something has arrived that is not the transport's; the message says what is wrong with it."""


def receive(connection: Connection, kind: type[T], seal: Seal) -> T:
    """The next message, of this kind and with its ``seal``.  Raises Nonsense where something else comes, EOFError,
    OSError.
    """
    head = exactly(connection, HEAD.size)
    size = LANGUAGE.size(head, LONGEST_HEADER)
    if isinstance(size, Unreadable):
        raise Nonsense(str(size)[:200])
    body, its = exactly(connection, size), exactly(connection, SEAL)
    if not seal.fits(head + body, its):
        raise Nonsense(UNSEALED)
    message = LANGUAGE.message(bytes(body))
    if not isinstance(message, kind):
        raise Nonsense(str(message)[:200])
    return message


def raw(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host that has elements."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def exactly(connection: Connection, length: int) -> bytearray:
    """Exactly ``length`` bytes; EOFError when the peer closes first."""
    received = bytearray(length)
    fill(connection, memoryview(received))
    return received


def fill(connection: Connection, target: memoryview) -> None:
    """Read into all of ``target``; EOFError when the peer closes first."""
    while target:
        received = connection.recv_into(target, 0, socket.MSG_WAITALL)
        if not received:
            raise EOFError
        target = target[received:]


def end(connection: Connection) -> None:
    """Shut a connection, which wakes whoever is blocked on it."""
    with suppress(OSError):  # not connected any more, or closed
        connection.shutdown(socket.SHUT_RDWR)


def listening_at(host: str, backlog: int) -> socket.socket:
    """A listener at a free port of the address ``host``.  Raises OSError."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog)
