"""A connection of the coordinator, and what news lead to on connections."""

from __future__ import annotations

from dataclasses import dataclass, field

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.kept import Kept
from recycle_plugin.core.vocabulary.roster import WorkerId


@dataclass
class Line:
    """A connection. ``hello``: of its other end; ``rank``: of that end or the worker that it supervises, -1 for none;
    ``worker``: that end, if it is one. ``heard``: number of counted
    messages from it. ``kept``: sent messages that may have to be sent again. ``deaf``: its messages are dropped.
    ``term``: the last term that the other end knows of. ``generation``: the last that was sent.
    """

    hello: Hello
    rank: int
    worker: WorkerId | None = None
    heard: int = 0
    kept: Kept = field(default_factory=Kept)
    deaf: bool = False
    term: int = 0
    generation: int = -1


@dataclass
class Effects:
    """What news lead to.

    ``frames``: to be sent, each with its connection. ``closed``: connections to close. ``events``: for the user.
    ``refused``: why messages were refused, each with its connection. ``expected``: (rank, connection of its supervisor)
    from which heartbeats are expected. ``ended``: it is known how a worker ended. ``over``: the job is over.
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
        """Whether there are effects that others see."""
        return bool(self.frames or self.closed or self.events or self.refused or self.expected)
