"""Messages that let the coordinator's process die: on each connection the counts of messages received, and from the
coordinator to its standby all that it handles (core/coordinator/switchboard.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.typed import Finite


@dataclass(frozen=True)
class Got:
    """From an end of a connection: it has received ``count`` messages. From a standby: ``count`` news."""

    count: int


@dataclass(frozen=True)
class StandsBy:
    """From the coordinator to all: in this ``term`` a standby on another host listens at ``host`` and ``port``, or
    there is none (``host`` is empty). ``silent_s``: seconds of silence after which the coordinator counts as dead
    there.
    """

    term: int
    host: str
    port: int
    silent_s: Finite


@dataclass(frozen=True)
class Knows:
    """Answers StandsBy: the sender knows of the ``term``, and turns to no standby of an earlier one."""

    term: int


@dataclass(frozen=True)
class Turns:
    """The last message over a connection that the sender breaks because it hears nothing in this ``term``. It is not
    dead: it connects again, or turns to the standby.
    """

    term: int


@dataclass(frozen=True)
class SentBack:
    """From a standby to an end that has turned to it: it no longer counts that end, and the coordinator goes on."""


@dataclass(frozen=True)
class Snapshot:
    """From the coordinator to its standby: a ``piece`` of its state, as JSON (core/coordinator/state_dump.py).
    ``last``: no piece follows; ``count``: the news that the state contains.
    """

    piece: bytes
    last: bool
    count: int


@dataclass(frozen=True)
class Taken:
    """From the coordinator to its standby: what it handles at ``now``, in seconds. ``kind``: of news
    (switchboard.NEWS); ``line``: the connection; ``hello``, ``message`` (its frame), ``text``: if there are such.
    ``out``: the number of news whose effects are out; ``waits``: the effects of this one wait for the answer.
    """

    kind: str
    now: Finite
    line: int = -1
    hello: Hello | None = None
    message: bytes = b""
    text: str = ""
    out: int = 0
    waits: bool = False
