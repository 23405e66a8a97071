"""The messages between a server of a folder's segments and a reader.

The first message names the run and the folder. Each answer is one message; a :class:`Piece` is followed by its bytes.
Every message is sealed (authentication/handshake.py). A segment's bytes are not: their records have CRCs, by which the
reader finds damage.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from recycle_plugin.authentication.handshake import Seals
from recycle_plugin.authentication.tls_socket import Connection
from recycle_plugin.core.messages.encoding import LIMIT, Language
from recycle_plugin.errors import NotSaved
from recycle_plugin.folders import refusal
from recycle_plugin.runtime.lines.frames import Framing, Nonsense

T = TypeVar("T")
PIECE_BYTES = 1 << 20  # of a segment, at most, in one answer
LONGEST_QUESTION = 1 << 10  # bytes of a question; a longer message is no question


@dataclass(frozen=True)
class Ask:
    """Which segments of ``run`` are in the folder with this ``token``?"""

    run: str
    token: str


@dataclass(frozen=True)
class Listed:
    """A segment, and its present size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Listing:
    """The segments of the run in the folder."""

    segments: tuple[Listed, ...]


@dataclass(frozen=True)
class Want:
    """Asks for ``size`` bytes from ``offset`` of the segment ``name``, which was listed on this line."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Piece:
    """The next ``size`` bytes are those asked for, possibly fewer than asked for."""

    size: int


@dataclass(frozen=True)
class Refusal:
    """The question is refused, and ``why``; the line ends."""

    why: str


LANGUAGE = Language((Ask, Listing, Want, Piece, Refusal))
FRAMES = Framing(LANGUAGE)


class LogLine(NamedTuple):
    """An authenticated connection, and its seals."""

    connection: Connection
    seals: Seals

    def say(self, message: object) -> None:
        """Send a message. Raises OSError."""
        self.connection.sendall(FRAMES.frame(message, self.seals.out))

    def hear(self, kind: type[T], limit: int = LIMIT) -> T:
        """Return the next message, of this ``kind``. Raises Nonsense if it is of another kind, EOFError at the end,
        OSError.
        """
        message = FRAMES.receive(self.connection, object, self.seals.into, limit)
        if isinstance(message, Refusal):
            raise Nonsense(f"it is refused: {message.why[:200]}")
        if not isinstance(message, kind):
            raise Nonsense(f"a {type(message).__name__} where it should be a {kind.__name__}")
        return message


def token_of(folder: Path, run: str) -> str:
    """Return the token of a folder in a run: the same on any host that sees this folder, and different for any other.
    Raises NotSaved. The first caller leaves it there, in one step. On a file system without links nobody can, and each
    caller gets another one.
    """
    place, made = folder / f"{run}.token", folder / f".{uuid.uuid4().hex}.unfinished"
    try:
        with suppress(FileNotFoundError):  # the token is readable even if nothing can be written any more
            if token := place.read_text():
                return token
        try:
            made.write_text(uuid.uuid4().hex)
            with suppress(OSError):  # it exists already, or there are no links
                os.link(made, place)
            return (place if place.exists() else made).read_text()
        finally:
            made.unlink(missing_ok=True)
    except OSError as error:
        raise NotSaved(refusal(folder, error)) from error
