"""What is said on a line between who serves the segments of a folder and who reads them there.

The first message says of which run and folder; each answer is one message, and behind a :class:`Piece` its bytes.
Every message is sealed (authentication/handshake.py).  A segment's bytes are not: its records have CRCs, by
which whoever reads them finds what is damaged.
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
PIECE_BYTES = 1 << 20  # at most, of a segment at once
LONGEST_QUESTION = 1 << 10  # bytes of a question; what says more is none of ours


@dataclass(frozen=True)
class Ask:
    """Which segments of ``run`` are in the folder with this ``token``?"""

    run: str
    token: str


@dataclass(frozen=True)
class Listed:
    """A segment, and how many bytes it has by now."""

    name: str
    size: int


@dataclass(frozen=True)
class Listing:
    """The segments of that run in that folder."""

    segments: tuple[Listed, ...]


@dataclass(frozen=True)
class Want:
    """A part of the segment ``name``, which was listed on this line: so many bytes from ``offset`` on."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Piece:
    """The next ``size`` bytes behind this are those that were wanted, as far as there are so many."""

    size: int


@dataclass(frozen=True)
class Refusal:
    """There is nothing for who has asked, and ``why``; the line ends."""

    why: str


LANGUAGE = Language((Ask, Listing, Want, Piece, Refusal))
FRAMES = Framing(LANGUAGE)


class LogLine(NamedTuple):
    """A connection that has authenticated, and its seals."""

    connection: Connection
    seals: Seals

    def say(self, message: object) -> None:
        """Send a message.  Raises OSError."""
        self.connection.sendall(FRAMES.frame(message, self.seals.out))

    def hear(self, kind: type[T], limit: int = LIMIT) -> T:
        """The next message, which is of this kind and has at most ``limit`` bytes.  Raises Nonsense where something
        else comes, EOFError at the end, OSError.
        """
        message = FRAMES.receive(self.connection, object, self.seals.into, limit)
        if isinstance(message, Refusal):
            raise Nonsense(f"it is refused: {message.why[:200]}")
        if not isinstance(message, kind):
            raise Nonsense(f"a {type(message).__name__} where it should be a {kind.__name__}")
        return message


def token_of(folder: Path, run: str) -> str:
    """The token of a folder in a run: the same one for all who see this folder, on whatever host, and another one in
    any other folder.  Raises NotSaved.

    Whoever comes first leaves it there, in one step.  Where a file system has no links nobody can leave one, and each
    who asks gets another one.
    """
    place, made = folder / f"{run}.token", folder / f".{uuid.uuid4().hex}.unfinished"
    try:
        with suppress(FileNotFoundError):  # also where nothing can be written any more
            if token := place.read_text():
                return token
        try:
            made.write_text(uuid.uuid4().hex)
            with suppress(OSError):  # it is there already, or there are no links
                os.link(made, place)
            return (place if place.exists() else made).read_text()
        finally:
            made.unlink(missing_ok=True)
    except OSError as error:
        raise NotSaved(refusal(folder, error)) from error
