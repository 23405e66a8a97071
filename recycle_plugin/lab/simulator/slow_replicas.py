"""What is checked of jobs that look for slow replicas, once they are over: who was named, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from recycle_plugin.core.coordinator.output import Event
from recycle_plugin.core.coordinator.restarts import starts_in_a_row
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.lab.simulator.message_delays import FAIR

ENOUGH = 3  # steps, by whose median is judged what a step takes


def mistaken(cluster: Any) -> Iterator[str]:
    """What was wrong about slow replicas, line by line; ``cluster``: a job that is over."""
    scenario = cluster.scenario
    if scenario.slow is None:
        return
    for at, event in cluster.events:
        if event.kind == "slow_replica" and not event.details["over"]:
            yield from _wrongly_named(cluster, at, event)
    for at, event in _drops(cluster):
        if scenario.slow != "drop":
            yield f"replica {event.details['replica']} was taken offline, and nobody has asked for that"
        if scenario.weather == FAIR:  # in others the same step takes 70 ms now and 200 ms then
            yield from _not_worth_it(cluster, at, event)
    most = 1 + starts_in_a_row(scenario.rejoin)
    for replica in range(scenario.shape.replicas):
        drops = [event for _, event in _drops(cluster) if event.details["replica"] == replica]
        if len(drops) > most:
            yield f"replica {replica} was dropped {len(drops)} times, and {most} are the most"


def _drops(cluster: Any) -> list[tuple[int, Event]]:
    return [(at, event) for at, event in cluster.events if event.kind == "replica_dropped"]


def _wrongly_named(cluster: Any, at: int, event: Event) -> Iterator[str]:
    slow = {
        seat
        for trouble in cluster.scenario.troubles
        if trouble.kind == "slow" and trouble.percent > 100 and trouble.at_us <= at
        for seat in trouble.seats
    }
    name, replica = event.details["seat"], event.details["replica"]
    if cluster.scenario.weather == FAIR and replica not in {seat.replica for seat in slow}:
        yield f"replica {replica} is said to hold the exchange up, and nobody in it is slow"
    elif name is not None and Seat.parse(name) not in slow:
        yield f"seat {event.details['seat']} is said to hold the exchange up, and is not slow"


def _not_worth_it(cluster: Any, at: int, event: Event) -> Iterator[str]:
    """Compares what each sample takes while the replica was there and slow, and once the others go on without it."""
    committed = [(when, each) for when, each in cluster.events if each.kind == "committed"]
    before = [when for when, _ in committed if when <= at][-ENOUGH - 1 :]
    gone = next((when for when, each in cluster.events if when > at and each.kind == "resume"), None)
    if gone is None:
        return
    later = next((when for when, each in cluster.events if when > gone and each.kind in ("resume", "lost")), None)
    after = [(when, each) for when, each in committed if when > gone and (later is None or when < later)][1:]
    if len(after) <= ENOUGH:
        return
    live = len(after[0][1].details.get("contributed", range(cluster.scenario.shape.replicas)))
    had = next(each for when, each in reversed(committed) if when <= at)
    share = live / len(had.details.get("contributed", range(cluster.scenario.shape.replicas)))
    with_us, without_us = _gap(before), _gap([when for when, _ in after]) / share
    if without_us >= with_us:
        yield (
            f"replica {event.details['replica']} was dropped, and the same samples take {without_us / 1000:.0f} ms "
            f"instead of {with_us / 1000:.0f} ms"
        )


def _gap(times: list[int]) -> float:
    return median(later - earlier for earlier, later in zip(times, times[1:]))
