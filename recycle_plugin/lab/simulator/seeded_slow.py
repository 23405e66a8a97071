"""Jobs with a slow replica, drawn from seeds (lab/simulator/seeded.py)."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
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
