"""A membership of 2 replicas x 2 stages that logs, and loses the workers of a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, Event
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.from_workers import (
    CatchUp,
    CaughtUp,
    Durable,
    Exited,
    Logged,
    Ready,
    Stepped,
)
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.roster import WorkerId
from tests.support.membership import job, member, started, step

LEFT, BACK = (0, 1), WorkerId(2, 1)  # stage 0; who comes back to stage 1, whose ranks are 2 and 3


def logging(durable: bool = True, **more: Any) -> Membership:
    """2 x 2 that logs, with a checkpoint of step 1, and two steps committed that are on all disks."""
    membership = started(**({"log": True, "rejoin": "always"} | more))
    for rank in range(4):
        membership.identify(WorkerId(rank))
    for number in (1, 2):
        step(membership, 0, number)
        for rank in range(4):
            membership.receive(Logged(rank, number), 0.0)
        if durable and number == 1:
            membership.receive(Durable(0, 1, "a folder"), 0.0)
    return membership


def lose(membership: Membership, *ranks: int, now: float = 1.0) -> CoordinatorOutput:
    """They die; what is said at the last one's death."""
    for rank in ranks:
        out = membership.receive(Exited(rank, -9, now), now)
    return out


def having_lost(*ranks: int) -> Membership:
    """A job that logs, and whose workers of these ranks have died."""
    membership = logging()
    lose(membership, *ranks)
    return membership


def decisions(out: CoordinatorOutput) -> list[Event]:
    return [event for event in out.events if event.kind == "recovery"]


def come(membership: Membership, worker: WorkerId = BACK, **more: Any) -> CoordinatorOutput:
    """The next process of a rank comes, and asks for its stage's state."""
    membership.identify(worker)
    membership.greet(worker, "h")
    asks = job(**({"log": True, "rejoin": "always"} | more))
    seated = replace(member(worker.rank, replicas=asks.replicas), incarnation=worker.incarnation)
    ready = Ready(seated, 0, asks)
    membership.receive(ready, 1.0)
    return membership.receive(CatchUp(worker.rank, incarnation=worker.incarnation), 1.0)


def has_replayed(membership: Membership, worker: WorkerId = BACK) -> CoordinatorOutput:
    return membership.receive(CaughtUp(worker.rank, 2, 9, 0, incarnation=worker.incarnation), 1.0)


class Kept:
    """A log that notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: self.calls.append((name, *given))


def trained(write_s: float = 0.0, **more: object) -> Membership:
    """2 x 2 that logs, with a checkpoint of step 0, and three steps committed, of 2 s; workers of stage 0 compute
    0.25 s in each, those of stage 1 0.5 s.
    """
    membership = started(**({"log": True, "rejoin": "always"} | more))
    for rank in range(4):
        membership.identify(WorkerId(rank))
    membership.receive(Durable(0, 0, "a folder", write_s=write_s), 0.0)
    for number in (1, 2, 3):
        for rank in range(4):
            spent = 250_000 * (1 + rank // 2)
            membership.receive(Logged(rank, number), 2.0 * number)
            membership.receive(Stepped(rank, 0, number, time=ComputeTime(spent, spent)), 2.0 * number)
    return membership
