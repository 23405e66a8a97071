"""What is said so that the coordinator's process may die: over each connection how much has come, and from the one that
coordinates to the one that stands by, all that it takes in (core/coordinator/switchboard.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.messages.from_workers import Hello


@dataclass(frozen=True)
class Got:
    """So many messages have come over this connection, and need not be sent again."""

    count: int


@dataclass(frozen=True)
class Snapshot:
    """A piece of the state of the one that coordinates, as JSON (core/coordinator/state_dump.py)."""

    piece: bytes
    last: bool


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
