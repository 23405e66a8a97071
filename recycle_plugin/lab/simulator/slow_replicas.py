"""Checks of jobs that look for slow replicas, once they are over: were the right ones named?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.lab.simulator.message_delays import FAIR


def mistaken(cluster: Any) -> Iterator[str]:
    """Yield what was wrong about slow replicas; ``cluster``: a job that is over."""
    scenario = cluster.scenario
    if not scenario.slow:
        return
    for at, event in cluster.events:
        if event.kind == "slow_replica" and not event.details["over"]:
            yield from _wrongly_named(cluster, at, event)


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
