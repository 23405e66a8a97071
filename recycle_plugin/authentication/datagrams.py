"""Datagrams of those whose connection has authenticated: each has a number and a seal, and counts once.

Datagrams are lost, and overtake each other: one counts if its number is above those that have counted.  Keys are those
of a connection's handshake, so that none of before counts.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from struct import Struct
from typing import Generic, TypeVar

from recycle_plugin.authentication.handshake import SEAL, Stranger

Sender = TypeVar("Sender")
HEAD = Struct(">8sQ")  # whose key it is, and the datagram's number
LONGEST = 1 << 10  # bytes of one


def _name(key: bytes) -> bytes:
    return hmac.digest(key, b"name", "sha256")[:8]


class SealedDatagrams:
    """Makes the datagrams of one connection, whose ``key`` for them is in its Seals."""

    def __init__(self, key: bytes) -> None:
        self.key, self._name, self._number = key, _name(key), 0

    def sealed(self, message: bytes) -> bytes:
        """The next datagram, with ``message`` in it."""
        self._number += 1
        head = HEAD.pack(self._name, self._number)
        return head + message + hmac.digest(self.key, head + message, "sha256")[:SEAL]


@dataclass
class _Known(Generic[Sender]):
    """A sender, the key of its datagrams, and the number of the last one that counted."""

    sender: Sender
    key: bytes
    last: int = 0


class DatagramDoor(Generic[Sender]):
    """Lets datagrams in under known keys, each of which is a sender's; of each place the last two keys count: what was
    sent under the one before may still be under way.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[bytes, ...]] = {}  # by place, the last one first
        self._known: dict[bytes, _Known[Sender]] = {}

    def expect(self, place: int, sender: Sender, key: bytes) -> None:
        """Take the datagrams of ``sender``, who has this ``place`` now, under ``key``."""
        names = (_name(key), *self._names.get(place, ()))
        self._known[names[0]] = _Known(sender, key)
        for name in names[2:]:
            del self._known[name]
        self._names[place] = names[:2]

    def opened(self, data: bytes) -> tuple[Sender, bytes] | None:
        """Who has sent it, and its message; None where it was here before, or a later one was.  Raises
        Stranger where it is nobody's who is known.
        """
        name, number = HEAD.unpack_from(data) if HEAD.size + SEAL <= len(data) <= LONGEST else (b"", 0)
        body, seal = data[:-SEAL], data[-SEAL:]
        known = self._known.get(name)
        if known is None or not hmac.compare_digest(hmac.digest(known.key, body, "sha256")[:SEAL], seal):
            raise Stranger("a datagram that nobody of this job has sealed")
        if number <= known.last:
            return None
        known.last = number
        return known.sender, body[HEAD.size :]
