"""Confused workers (lab/simulator/confusion.py) in jobs drawn from seeds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from recycle_plugin.lab.simulator.drawn_troubles import CALM_US
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Scenario, Trouble


def with_confused_workers(given: Scenario, random: Random) -> Scenario:
    """Confuse workers in one job of sixteen."""
    return confused(given, random) if random.random() < 1 / 16 else given


def confused(given: Scenario, random: Random) -> Scenario:
    """Return the job with one worker, or in a third of the cases two, confused from some time on."""
    seats = random.sample(given.shape.seats, random.choice((1, 1, 2)))
    at = random.randrange(CALM_US)
    confusion = Trouble("confused", at, tuple(seats), for_us=random.choice((300, 2_000, 20_000)) * MILLISECOND)
    return replace(given, troubles=given.troubles + (confusion,))
