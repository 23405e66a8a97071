"""Encoding of messages as bytes: frames of a fixed head and a msgpack body.

The head has two letters, the *version* (a checksum of every message's fields, so nobody can forget to count it up) and
the body's length in bytes. The head and a limit on the length are checked before a byte of the body is read. The body
is a list: the number of the message's kind on such a line, then its fields (core/messages/typed.py). Texts may be any
that Python has, and whole numbers any that a float can hold. Long bodies for all members are packed.

Reading never raises: bytes that are no message become an :class:`~recycle_plugin.core.messages.typed.Unreadable`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from struct import Struct
from zlib import compress, crc32, decompressobj
from zlib import error as Unpackable

import msgpack

from recycle_plugin.core.messages.protocol import MESSAGES
from recycle_plugin.core.messages.typed import Unreadable, form_of, read, values
from recycle_plugin.core.vocabulary.cut_text import shown

MAGIC = b"RP"
HEAD = Struct(">2sII")
LIMIT = 1 << 24  # bytes of a body as it is sent
LONG = 1 << 9  # bytes of a body that is worth packing
UNPACKED = 1 << 28  # bytes that a body may unpack to
PACKED = b"x"  # how a packed body begins, and no other does
MOST = 1 << 20  # entries of one list or dict: msgpack makes room for them before they are there
LARGE = 1  # our msgpack type number for whole numbers of more than 64 bits
LARGEST = 127  # bytes of such a number


class OtherVersion(Unreadable):
    """A frame of another version of the plugin."""


class Language:
    """The messages of one sort of connection, ``kinds``, numbered by order. ``version``: a checksum of their fields."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._kinds = kinds
        self._numbers = {kind: number for number, kind in enumerate(kinds)}
        self.version = crc32("\n".join(form_of(kind).text for kind in kinds).encode())

    def encode(self, message: object) -> bytes:
        """Return the frame of ``message``. Raises TypeError for an unwritable field, ValueError if it is too long."""
        body: bytes = msgpack.packb(
            (self._numbers[type(message)], *values(message)), default=_other, unicode_errors="surrogatepass"
        )
        if len(body) > (most := getattr(message, "MOST", LIMIT)):
            raise ValueError(f"a {type(message).__name__} of {len(body)} bytes is too long to be sent: at most {most}")
        if len(body) > LONG and getattr(message, "PACKS", False):
            body = min(body, compress(body), key=len)
        return HEAD.pack(MAGIC, self.version, len(body)) + body

    def size(self, head: bytes | bytearray, limit: int = LIMIT) -> int | Unreadable:
        """Return the bytes of the body behind ``head``; an Unreadable if that is no head, or above ``limit``."""
        size: int
        magic, version, size = HEAD.unpack_from(head)
        if magic != MAGIC:
            return Unreadable("a frame", f"begins with {bytes(head[: HEAD.size])!r}, and no message does")
        if version != self.version:
            return OtherVersion(
                "a frame",
                f"is of version {version:08x}, and this is {self.version:08x}: all need the same version of the plugin",
            )
        if size > limit:
            return Unreadable("a frame", f"has a body of {size} bytes, and at most {limit} are read")
        return size

    def message(self, body: bytes | bytearray, limit: int = UNPACKED) -> object:
        """Return the message whose body is ``body``, or an Unreadable. ``limit``: bytes that it may unpack to."""
        try:
            body = _unpacked(body, limit) if body[:1] == PACKED else body
            plain = msgpack.unpackb(
                body, ext_hook=_extension, unicode_errors="surrogatepass", max_array_len=MOST, max_map_len=MOST
            )
        except (ValueError, MemoryError, Unpackable) as error:
            return Unreadable("a body", f"of {len(body)} bytes is no msgpack: {str(error) or type(error).__name__}")
        number = plain.pop(0) if type(plain) is list and plain else None
        if type(number) is not int or not 0 <= number < len(self._kinds):
            return Unreadable("a body", f"does not begin with the number of a message: {shown(number)}")
        kind = self._kinds[number]
        if len(body) > (most := getattr(kind, "MOST", LIMIT)):
            return Unreadable(kind.__name__, f"has {len(body)} bytes, and at most {most} are read")
        return read(kind, plain, kind.__name__)


CONTROL = Language(MESSAGES)
encode = CONTROL.encode
VERSION = HEAD.pack(MAGIC, CONTROL.version, 0)  # tells an end of another version, which reads no more than a head


def decode(frame: bytes) -> object:
    """Return the message of one whole frame, as :func:`encode` makes it; else an Unreadable."""
    if len(frame) < HEAD.size:
        return Unreadable("a frame", "ends before its message does")
    size = CONTROL.size(frame)
    if isinstance(size, Unreadable):
        return size
    if len(frame) != HEAD.size + size:
        cut = len(frame) < HEAD.size + size
        return Unreadable("a frame", "ends before its message does" if cut else "has more bytes after its message")
    return CONTROL.message(frame[HEAD.size :])


class Frames:
    """A buffer that puts together messages that come in pieces. A body longer than ``limit`` bytes is an Unreadable; so
    is a frame that does not fit the ``seal`` bytes behind it, by ``fits``.
    """

    def __init__(
        self, limit: int = LIMIT, seal: int = 0, fits: Callable[[bytearray, bytearray], bool] = lambda frame, seal: True
    ) -> None:
        self._limit = limit
        self._seal, self._fits = seal, fits
        self._rest = bytearray()

    def feed(self, data: bytes) -> None:
        self._rest += data

    @property
    def broken_off(self) -> bool:
        """Whether the bytes end in the middle of a message."""
        return bool(self._rest)

    def take(self) -> object | None:
        """Return the next message and remove it; None if it is incomplete. After an Unreadable no further message can
        be found.
        """
        if len(self._rest) < HEAD.size:
            return None
        size = CONTROL.size(self._rest, self._limit)
        if isinstance(size, Unreadable):
            return size
        end = HEAD.size + size
        if len(self._rest) < end + self._seal:
            return None
        frame, seal = self._rest[:end], self._rest[end : end + self._seal]
        del self._rest[: end + self._seal]
        if not self._fits(frame, seal):
            return Unreadable("a frame", "does not fit its seal: somebody on the way has changed it, or sent it again")
        return CONTROL.message(frame[HEAD.size :], UNPACKED if self._limit >= LIMIT else self._limit)


def _unpacked(body: bytes | bytearray, limit: int) -> bytes:
    """Return a body unpacked. Raises ValueError or zlib's error if it is damaged or has more than ``limit`` bytes."""
    stream = decompressobj()
    plain = stream.decompress(body, limit)
    if not stream.eof or stream.unused_data:
        raise ValueError(f"it is cut off, or longer than {limit} bytes")
    return plain


def _other(thing: object) -> object:
    """Return a value that msgpack does not know as one that it does. Raises TypeError for a number of too many bits."""
    if type(thing) is int:
        if thing.bit_length() >= 8 * LARGEST:
            raise TypeError(f"a number of {thing.bit_length()} bits can't be written down")
        return msgpack.ExtType(LARGE, thing.to_bytes(thing.bit_length() // 8 + 1, "big", signed=True))
    return thing.value if isinstance(thing, Enum) else values(thing)


def _extension(code: int, data: bytes) -> int:
    if code != LARGE:
        raise ValueError(f"type number {code} means nothing")
    if len(data) > LARGEST:
        raise ValueError(f"a number of {len(data)} bytes, and at most {LARGEST} are read")
    return int.from_bytes(data, "big", signed=True)
