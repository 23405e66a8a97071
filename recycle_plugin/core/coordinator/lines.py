"""A connection of the coordinator's, and what news lead to at any of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.kept import Kept
from recycle_plugin.core.vocabulary.roster import WorkerId


@dataclass
class Line:
    """A connection: who has come over it, as which ``worker`` if it is one, how many of its messages were ``heard``,
    and what was sent over it; ``deaf``: nothing that it says counts.  ``term``: the last that its other end knows of.
    """

    hello: Hello
    worker: WorkerId | None = None
    heard: int = 0
    kept: Kept = field(default_factory=Kept)
    deaf: bool = False
    term: int = 0


@dataclass
class Effects:
    """What news lead to: ``frames`` to be sent, each over a connection, connections to be ``closed``, events for the
    user, words that are ``refused``, each with the connection that it has come over, and ranks whose heartbeats are to
    be ``expected`` from a connection's supervisor; ``ended``: it is known how a worker has ended; ``over``: the job is
    over.
    """

    frames: list[tuple[int, bytes]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    expected: list[tuple[int, int]] = field(default_factory=list)
    ended: bool = False
    over: bool = False

    @property
    def some(self) -> bool:
        """Whether there are any that somebody sees."""
        return bool(self.frames or self.closed or self.events or self.refused or self.expected)
