"""Requests of an operator at a terminal to the coordinator; each gets an Answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ask:
    """An operator's request."""


@dataclass(frozen=True)
class AskLeave(Ask):
    """Asks that the holder of ``seat`` leaves as planned."""

    seat: str


@dataclass(frozen=True)
class AskDrain(Ask):
    """Asks that all seats on ``host`` leave as planned, and that no process is started there."""

    host: str


@dataclass(frozen=True)
class AskAdmit(Ask):
    """Asks that ``seat``, which has left as planned or was given up, gets a process again."""

    seat: str
