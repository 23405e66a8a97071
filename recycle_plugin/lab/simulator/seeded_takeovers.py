"""Jobs drawn from seeds in which the coordinator dies, or is cut off, and others take its place."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from recycle_plugin.lab.simulator.drawn_troubles import SETTLED_US
from recycle_plugin.lab.simulator.scenario import HOSTS, MILLISECOND, Scenario, Trouble

KEPT = ("kill", "stop", "slow", "leave", "end", "finish")  # what else may go wrong
POINTS = (
    "begun", "asked", "admitted", "knows", "knows elsewhere", "in step", "term", "alone", "turned", "elected", "leads",
    "home", "back",
)  # fmt: skip
PROCESSES = ("coordinator", "standby", "candidate")
STEPS = 10  # more than else, each with a pause: a process stands by elsewhere by then


def with_takeovers(given: Scenario, random: Random) -> Scenario:
    """The job ``given``, without what else is wrong with its lines, and with one to three troubles of those that
    coordinate, at any time or at a step of taking over; in half of them without any other trouble.
    """
    kept = [each for each in given.troubles if each.kind in KEPT] if random.random() < 0.5 else []
    faults = given.faults if kept and random.random() < 0.5 else ()
    steps = given.steps + STEPS if given.rejoin == "never" else given.steps
    between = [(step, "pause") for step in range(1, steps + 1)]
    count = random.choice((1, 1, 1, 2, 2, 3))
    at, troubles = random.randrange(SETTLED_US, 4_000 * MILLISECOND), []
    for number in range(count):
        troubles.append(_trouble(given, random, at, number))
        at += random.choice((random.randrange(200), random.randrange(2_000), random.randrange(8_000))) * MILLISECOND
    return replace(
        given,
        troubles=(*kept, *troubles),
        faults=faults,
        steps=steps,
        between=tuple(sorted({*given.between, *between}, reverse=True)),
        heavy=(),
        full=(),
        logs=False,
        log_choices=(),
        logs_apart=False,
        log_full=(),
        slow=False,
        pushes=False,
        shards=1,
        reloads=0.0,
        takes_over=True,
    )


def _trouble(given: Scenario, random: Random, at: int, number: int) -> Trouble:
    kind = random.choice((*PROCESSES, "coordinator", *HOSTS, HOSTS[0], "partition", "partition", "pause", "hold"))
    point, count = ("", 1)
    if number and random.random() < 0.6:  # while it is being taken over
        point, count = random.choice(POINTS), random.choice((1, 1, 1, 2, 3))
        at = random.choice((0, 0, 1, 20, 300)) * MILLISECOND
    elif random.random() < 0.2:
        point, at = random.choice(POINTS), random.choice((0, 1, 50)) * MILLISECOND
    lasts = random.choice((300, 1_200, 2_500, 4_000, 8_000, 60_000)) * MILLISECOND if kind not in PROCESSES else 0
    if kind in HOSTS:
        lasts = 0
    seats = list(given.shape.seats)
    most = random.choice((1, len(seats) // 2, len(seats) - 1))
    some = random.choice(((), tuple(random.sample(seats, most)))) if kind == "partition" else ()
    percent = random.choice((0, 100)) if kind == "hold" else 100
    return Trouble(kind, at, some, for_us=lasts, percent=percent, point=point, number=count)
