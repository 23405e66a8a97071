"""What a worker is given up for is said in one word of few, by which metrics count, and each of them can come to be
said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.messages.from_workers import (
    Crashed,
    Exited,
    Fingerprint,
    Heartbeat,
    Missing,
    Stepped,
    SupervisorHeartbeat,
)
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from tests.support.membership import agree, computes, member, started, step

Outputs = Iterator[CoordinatorOutput]
LAST = 3  # the rank that something happens to


def error() -> Outputs:
    membership = started()
    membership.receive(Crashed(LAST, "ValueError: no"), 0.0)
    yield membership.connection_lost(member(LAST).worker, 0.0)


def broken() -> Outputs:
    yield started().connection_lost(member(LAST).worker, 0.0)


def dead() -> Outputs:
    yield started().receive(Exited(LAST, -9, 0.0), 0.0)


def differs() -> Outputs:
    membership = started(replicas=4, stages=1)
    for rank in range(4):
        membership.receive(Fingerprint(rank, 1, "other" if rank == LAST else "same"), 0.0)
        yield membership.receive(Stepped(rank, 0, 1), 0.0)


def confused() -> Outputs:
    yield started().receive(Stepped(LAST, 0, 9), 0.0)


def link() -> Outputs:
    membership = started()
    for generation in range(3):
        yield membership.receive(Missing(1, generation, "what it waits for", "1.1"), 0.0)
        agree(membership, generation + 1, dict.fromkeys(range(4), 0))


def together() -> Outputs:
    membership = started(unit="replica")
    yield membership.connection_lost(member(1).worker, 0.0)


def owing(pulses: Callable[[int], SupervisorHeartbeat | None], at: Activity = Activity(WAITS)) -> Outputs:
    """While the last rank is ``at`` that, its supervisor says what ``pulses`` has; it and its supervisor nothing, where
    that is None.
    """
    membership, now = started(), 0.0
    step(membership, 0, 1)
    for _ in range(round(60 / TICK_S)):
        for rank in range(4):
            pulse = pulses(rank)
            if pulse is not None:
                membership.receive(pulse, now)
                if not pulse.stopped:
                    membership.receive(Heartbeat(rank, 2, 0, at if rank == LAST else Activity(WAITS)), now)
        yield membership.tick(now := now + TICK_S)


SAID = {
    Cause.ERROR: [error],
    Cause.DIED: [broken, dead],
    Cause.DIFFERS: [differs],
    Cause.LINK: [link],
    Cause.CONFUSED: [confused],
    Cause.TOGETHER: [together],
    Cause.SILENT: [lambda: owing(lambda rank: None if rank == LAST else SupervisorHeartbeat(rank, False, 0.0))],
    Cause.STOPPED: [lambda: owing(lambda rank: SupervisorHeartbeat(rank, rank == LAST, 0.0))],
    Cause.STUCK: [lambda: owing(lambda rank: SupervisorHeartbeat(rank, False, 0.0), computes("1F0.1@2"))],
}


def test_each_cause_is_said_of_who_is_lost_by_it():
    for cause in Cause:
        for happens in SAID[cause]:
            lost = {
                event.details["rank"]: event.details["cause"]
                for out in happens()
                for event in out.events
                if event.kind == "lost"
            }
            assert lost[LAST] == cause.value, (cause, lost)


def test_who_is_suspected_first_is_lost_for_the_same():
    for cause in (Cause.SILENT, Cause.STOPPED, Cause.STUCK):
        said = [
            (event.kind, event.details["cause"])
            for out in SAID[cause][0]()
            for event in out.events
            if event.kind in ("suspected", "lost") and event.details["rank"] == LAST
        ]
        assert said == [("suspected", cause.value), ("lost", cause.value)]
