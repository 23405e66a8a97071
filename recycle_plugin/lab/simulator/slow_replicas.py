"""Jobs with a slow replica: drawn from seeds (lab/simulator/seeded.py), and checked once they are over: were the right
ones named?
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator.message_delays import FAIR
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Scenario, Trouble

SHARE = 1 / 60
AGAIN_US = 300 * MILLISECOND  # how soon the successor of a slow worker is slow too
LASTS_US = 15_000 * MILLISECOND
PERCENT = (130, 200, 300, 400)


def with_slow_replicas(given: Scenario, random: Random) -> Scenario:
    """Replace one in sixty jobs (no logs, no iterators) by one with a slow worker, and in three of ten a kill."""
    if given.logs or given.iterators or random.random() >= SHARE:
        return given
    shape = Topology(random.choice((2, 3)), 2, random.choice((2, 3)))
    seat, rejoin = random.choice(shape.seats), random.choice(("never", 1, 1, 2))
    begins = range(random.randrange(500 * MILLISECOND), LASTS_US, AGAIN_US)
    percent = random.choice(PERCENT)
    troubles = tuple(Trouble("slow", at, (seat,), percent=percent) for at in begins)
    if random.random() < 0.3:
        other = Seat(random.randrange(shape.replicas), random.randrange(shape.stages))
        troubles += (Trouble("kill", random.randrange(2_000 * MILLISECOND), (other,)),)
    stages, costs = shape.stages, given.costs
    return Scenario(
        shape,
        replace(
            costs,
            **{name: getattr(costs, name)[:stages] for name in ("forward", "input", "weight", "reduce", "step")},
        ),
        Policy(shrinks=random.random() < 0.4),
        30,
        troubles,
        torn=given.torn,
        weather=given.weather,
        reloads=given.reloads,
        rejoin=rejoin,
        unit="replica",
        slow=True,
    )


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
