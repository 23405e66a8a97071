"""The output of the coordinator's state machine for one message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recycle_plugin.core.messages.from_coordinator import Fence
from recycle_plugin.core.vocabulary.roster import WorkerId

WORKERS, LAST_STAGE, SUPERVISORS = "workers", "workers of the last stage", "supervisors"


@dataclass(frozen=True)
class SupervisorOf:
    """The address of the supervisor of ``rank``. ``former``: also of earlier supervisors of that rank."""

    rank: int
    former: bool = False


@dataclass(frozen=True)
class Joiner:
    """The address of a supervisor that asks for a seat and has no rank yet."""

    number: int


Whom = str | WorkerId | SupervisorOf | Joiner


@dataclass(frozen=True)
class Event:
    """An event for the user: one line of text, and the same as data."""

    kind: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class CoordinatorOutput:
    """The output for one message: messages for workers and supervisors, and events for the user."""

    messages: list[tuple[Whom, object]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def tell(self, whom: Whom, message: object) -> None:
        """Add a message for ``whom``: WORKERS, LAST_STAGE, SUPERVISORS, or one of them."""
        self.messages.append((whom, message))

    def fence(self, worker: WorkerId, why: str) -> None:
        """Stop ``worker``: its supervisor kills it, and it is told so itself."""
        for whom in (SupervisorOf(worker.rank, former=True), worker):
            self.tell(whom, Fence(worker.rank, why, incarnation=worker.incarnation))

    def say(self, kind: str, text: str, **details: object) -> None:
        """Add an event for the user."""
        self.events.append(Event(kind, text, details))
