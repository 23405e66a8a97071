"""What a message to the coordinator leads to."""

from __future__ import annotations

from dataclasses import dataclass, field

from recycle_plugin.core.vocabulary.roster import WorkerId

WORKERS, SUPERVISORS = "workers", "supervisors"


@dataclass(frozen=True)
class Event:
    """Something a user wants to know: one line of text, and the same as data."""

    kind: str
    text: str
    details: dict = field(default_factory=dict)


@dataclass
class CoordinatorOutput:
    """What a message leads to: lines for workers (all live, or one), for supervisors, and for the user."""

    messages: list[tuple[str | WorkerId, object]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def tell(self, whom: str | WorkerId, message: object) -> None:
        self.messages.append((whom, message))

    def say(self, kind: str, text: str, **details: object) -> None:
        self.events.append(Event(kind, text, details))
