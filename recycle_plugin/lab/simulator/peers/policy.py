"""How a fault-tolerant system meets a trace: speeds between changes, and what a change costs.

A :class:`PeerPolicy` has a speed in each state, and a next state for each change of the cluster. :func:`replay` adds
the samples up. Which worker a loss hits is one number in [0, 1) per loss, drawn once for all policies. Each takes that
part of its own list of live workers, so all have the same luck.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

HOUR_S = 3600.0
UNVALIDATED = "unvalidated"


@dataclass(frozen=True, slots=True)
class WorkersChange:
    """A change at ``at_s`` seconds: a worker is lost for each draw in ``lost`` (in [0, 1)), or ``joined`` come back."""

    at_s: float
    lost: tuple[float, ...] = ()
    joined: int = 0


@dataclass(frozen=True, slots=True)
class PeerTransition:
    """The cost of a change: nothing is trained for ``pause_s``, and the last ``lost_s`` before it were in vain."""

    pause_s: float
    lost_s: float
    text: str


class PeerPolicy(Protocol):
    """A system as :func:`replay` needs it. ``source``: of the rules. ``validated``: published figures, or ""."""

    name: str
    source: str
    validated: str

    def start(self) -> Any:
        """Return the state of the whole cluster."""

    def speed(self, state: Any) -> float:
        """Return the samples per second in ``state``; 0 if it can't train."""

    def change(self, state: Any, change: WorkersChange, trained_s: float) -> tuple[Any, PeerTransition]:
        """Return the next state, and the change's cost. ``trained_s``: seconds since the last transition's end."""


@dataclass(frozen=True, slots=True)
class PeerSegment:
    """The time between two changes, in seconds. ``samples``: those that stay. ``opening``: the transition into it."""

    start_s: float
    end_s: float
    workers: int
    speed: float
    paused_s: float
    lost_s: float
    samples: float
    opening: str


@dataclass(frozen=True)
class Run:
    """The run of a policy through a trace."""

    policy: str
    segments: tuple[PeerSegment, ...]

    @property
    def samples(self) -> float:
        return sum(segment.samples for segment in self.segments)

    @property
    def average(self) -> float:
        """The samples per second over the whole trace, every transition's cost included."""
        return self.samples / (self.segments[-1].end_s - self.segments[0].start_s)

    @property
    def average_without_transitions(self) -> float:
        """The samples per second over the whole trace, as if changes cost nothing."""
        spans = [(segment.end_s - segment.start_s, segment.speed) for segment in self.segments]
        return sum(span * speed for span, speed in spans) / sum(span for span, _ in spans)

    @property
    def paused_s(self) -> float:
        """The seconds in which nothing was trained."""
        return sum(segment.paused_s for segment in self.segments)

    @property
    def lost_s(self) -> float:
        """The seconds of training that were in vain."""
        return sum(segment.lost_s for segment in self.segments)


def label(policy: PeerPolicy) -> str:
    """Return a policy's name for output, with "unvalidated" if it has no check against published figures."""
    return policy.name if policy.validated else f"{policy.name} ({UNVALIDATED})"


def replay(policy: PeerPolicy, changes: Sequence[WorkersChange], workers: int, end_s: float) -> Run:
    """Run ``policy`` through ``changes`` (in order of time) until ``end_s``. A change in a pause begins a new pause."""
    state, ready_s, start_s, opening = policy.start(), 0.0, 0.0, "start"
    segments = []
    for change in (*changes, None):
        until_s = end_s if change is None else change.at_s
        trained_s, speed = max(0.0, until_s - ready_s), policy.speed(state)
        lost_s, text = 0.0, ""
        if change is not None:
            state, transition = policy.change(state, change, trained_s)
            lost_s, text, ready_s = min(trained_s, transition.lost_s), transition.text, until_s + transition.pause_s
        paused_s = until_s - start_s - trained_s
        segments.append(
            PeerSegment(start_s, until_s, workers, speed, paused_s, lost_s, (trained_s - lost_s) * speed, opening)
        )
        if change is not None:
            workers, start_s, opening = workers - len(change.lost) + change.joined, until_s, text
    return Run(label(policy), tuple(segments))


def changes_of(points: Iterable[tuple[float, int]], seed: int = 0) -> list[WorkersChange]:
    """Return the changes of a trace of (hour, workers); ``seed`` decides whom losses hit."""
    draw, found, before = random.Random(seed), [], None
    for hour, workers in points:
        if before is not None and workers != before:
            lost = tuple(draw.random() for _ in range(before - workers))
            found.append(WorkersChange(hour * HOUR_S, lost, max(0, workers - before)))
        before = workers
    return found


def regular_losses(every_s: float, losses: int, seed: int = 0) -> list[WorkersChange]:
    """Return changes that lose one worker every ``every_s`` seconds, ``losses`` times; none comes back."""
    draw = random.Random(seed)
    return [WorkersChange(every_s * number, (draw.random(),)) for number in range(1, losses + 1)]


def count_after(workers: int, change: WorkersChange) -> int:
    """Return the number of workers after ``change``, for policies that need nothing else."""
    return workers - len(change.lost) + change.joined
