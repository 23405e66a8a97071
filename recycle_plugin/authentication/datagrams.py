"""Datagrams from senders whose connection has authenticated: each has a number and a seal, and counts once.

Datagrams get lost and overtake each other, so a datagram counts if its number is above all that have counted. Keys come
from a connection's handshake, so datagrams of an earlier connection do not count under a new key.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from struct import Struct
from typing import Generic, TypeVar

from recycle_plugin.authentication.handshake import SEAL, Stranger

Sender = TypeVar("Sender")
HEAD = Struct(">8sQ")  # name of the key, number of the datagram
LONGEST = 1 << 10  # bytes of a datagram


def _name(key: bytes) -> bytes:
    return hmac.digest(key, b"name", "sha256")[:8]


class SealedDatagrams:
    """The datagrams of one connection, sealed with a ``key`` from its Seals."""

    def __init__(self, key: bytes) -> None:
        self.key, self._name, self._number = key, _name(key), 0

    def sealed(self, message: bytes) -> bytes:
        self._number += 1
        head = HEAD.pack(self._name, self._number)
        return head + message + hmac.digest(self.key, head + message, "sha256")[:SEAL]


@dataclass
class _Known(Generic[Sender]):
    """A sender, the key of its datagrams, and the number of the last datagram that counted."""

    sender: Sender
    key: bytes
    last: int = 0


class DatagramDoor(Generic[Sender]):
    """The entrance for datagrams under known keys: of each place the last two, as old datagrams may be late."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[bytes, ...]] = {}  # {place: names of its keys, the latest first}
        self._known: dict[bytes, _Known[Sender]] = {}

    def expect(self, place: int, sender: Sender, key: bytes) -> None:
        """Accept datagrams under ``key`` as those of ``sender``, which now has this ``place``."""
        names = (_name(key), *self._names.get(place, ()))
        self._known[names[0]] = _Known(sender, key)
        for name in names[2:]:
            del self._known[name]
        self._names[place] = names[:2]

    def opened(self, data: bytes) -> tuple[Sender, bytes] | None:
        """Return sender and message, or None if this or a later datagram has counted. Raises Stranger."""
        name, number = HEAD.unpack_from(data) if HEAD.size + SEAL <= len(data) <= LONGEST else (b"", 0)
        body, seal = data[:-SEAL], data[-SEAL:]
        known = self._known.get(name)
        if known is None or not hmac.compare_digest(hmac.digest(known.key, body, "sha256")[:SEAL], seal):
            raise Stranger("a datagram that no process of this job has sealed")
        if number <= known.last:
            return None
        known.last = number
        return known.sender, body[HEAD.size :]
