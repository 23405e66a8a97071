"""What an operator at a terminal asks the coordinator for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ask:
    """An operator's request."""


@dataclass(frozen=True)
class AskLeave(Ask):
    """The holder of ``seat`` is to leave as planned."""

    seat: str


@dataclass(frozen=True)
class AskDrain(Ask):
    """All seats on ``host`` are to leave as planned, and nobody is to be started there."""

    host: str


@dataclass(frozen=True)
class AskAdmit(Ask):
    """Somebody is to hold ``seat`` again, which has left as planned, or was given up."""

    seat: str
