"""What is said so that the coordinator's process may die: over each connection how much has come, and from the one that
coordinates to the one that stands by, all that it takes in (core/coordinator/switchboard.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.messages.from_workers import Hello


@dataclass(frozen=True)
class Got:
    """So many messages have come over this connection, and need not be sent again; from one that stands by, so many
    news.
    """

    count: int


@dataclass(frozen=True)
class StandsBy:
    """In this ``term`` a process on another host stands by, and listens at the address ``host`` and ``port``; or nobody
    does (``host`` is empty).  ``silent_s``: so long may the coordinator say nothing before it is taken for dead there.
    """

    term: int
    host: str
    port: int
    silent_s: float


@dataclass(frozen=True)
class Knows:
    """The answer to that: this end knows of the ``term``, and turns to nobody who stood by in one before."""

    term: int


@dataclass(frozen=True)
class Turns:
    """The last word over a connection that this end breaks, since it hears nothing in this ``term``: it comes again, or
    turns to who stands by, and is not dead.
    """

    term: int


@dataclass(frozen=True)
class Snapshot:
    """A piece of the state of the one that coordinates, as JSON (core/coordinator/state_dump.py), with the first
    ``count`` news in it.
    """

    piece: bytes
    last: bool
    count: int


@dataclass(frozen=True)
class Taken:
    """What the one that coordinates takes in at ``now``, in seconds: a ``kind`` of news (switchboard.NEWS) of the
    connection ``line``, with a ``hello``, the frame of a ``message``, and a ``text``, where there are such.  ``out``:
    what has followed from so many news is out; it ``waits``: what follows from this waits for the answer.
    """

    kind: str
    now: float
    line: int = -1
    hello: Hello | None = None
    message: bytes = b""
    text: str = ""
    out: int = 0
    waits: bool = False
