"""Jobs drawn from seeds in which the coordinator dies, or is cut off, and others take its place."""

from __future__ import annotations

from random import Random

from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator.drawn_troubles import SETTLED_US, add_trouble, costs_of
from recycle_plugin.lab.simulator.message_delays import FAIR, STORMY, UNEVEN
from recycle_plugin.lab.simulator.scenario import HOSTS, MILLISECOND, Scenario, Trouble

KINDS = (*("kill",) * 4, "named", "recovery", "stop", "slow", "leave", "end")  # what else may go wrong
POINTS = (
    "begun", "asked", "admitted", "knows", "knows elsewhere", "in step", "term", "alone", "turned", "elected", "leads",
    "home", "back",
)  # fmt: skip
PROCESSES = ("coordinator", "standby", "candidate")
RARER = 10  # one in so many jobs needs a rule that others seldom need, without which two sides could decide


def with_a_takeover(seed: int) -> Scenario:
    """Return the job of ``seed`` with one to three troubles of coordinators and standbys, at any time or at a step of a
    takeover; in half of the jobs there is no other trouble.
    """
    random = Random(f"takeovers in {seed}")
    if seed % RARER == RARER - 1:
        return _rarer(random, seed)
    shape = Topology(random.choice((2, 2, 3)), random.choice((2, 2, 3)), random.randint(1, 3))
    policy = Policy(random.random() < 0.8, True, True, None, block=random.choice((1, 1, None)))
    costs, steps = costs_of(random, shape.stages), random.randint(7, 10)
    others: list[Trouble] = []
    faults: list[Fault] = []
    rejoin = random.choice(("never", "never", "always"))
    for _ in range(random.choice((0, 0, 0, 1, 1, 2))):
        add_trouble(random, shape, costs, policy, steps, others, faults, KINDS)
    at, troubles = random.randrange(SETTLED_US, 2_500 * MILLISECOND), []
    for number in range(random.choice((1, 1, 1, 2, 2, 3))):
        troubles.append(_trouble(shape, random, at, number))
        at += random.choice((random.randrange(200), random.randrange(2_000), random.randrange(8_000))) * MILLISECOND
    if seed % RARER == RARER - 2:
        troubles += _resets(Random(f"resets in {seed}"), shape)
    return Scenario(
        shape,
        costs,
        policy,
        steps + 16 * (rejoin == "always" and bool(others or faults)),
        (*others, *troubles),
        tuple(faults),
        seed,
        clip=random.choice((0.0, 0.0, 25.0)),
        weather=random.choice((FAIR, UNEVEN, STORMY)),
        iterators=policy.block == 1 and random.random() < 0.2,
        between=tuple((step, "pause") for step in range(1, steps + 1)),
        rejoin=rejoin,
        takes_over=True,
    )


def _resets(random: Random, shape: Topology) -> list[Trouble]:
    """Draw resets of live workers' connections to the coordinator, at any time or during a takeover."""
    found = []
    for _ in range(random.choice((1, 2, 3))):
        seats = tuple(random.sample(list(shape.seats), random.choice((1, 1, 2, len(list(shape.seats))))))
        at, point = random.choice(((random.randrange(SETTLED_US, 6_000 * MILLISECOND), ""), (0, random.choice(POINTS))))
        found.append(Trouble("line", at, seats, point=point))
    return found


def _rarer(random: Random, seed: int) -> Scenario:
    """Draw a job in which connections to a standby that workers turn to break while the coordinator comes back. Or
    hosts part when a returned worker is a member again, so that each side may go by a membership that the other does
    not know.
    """
    grows = random.random() < 0.5
    shape = random.choice((Topology(2, 2, 2), Topology(4, 1, 2), Topology(3, 2, 2)) if grows else (Topology(2, 2, 2),))
    at, seats = random.randrange(SETTLED_US, 1_500 * MILLISECOND), list(shape.seats)
    if grows:
        lost = random.choice(seats[1:])
        others = random.sample([each for each in seats[1:] if each is not lost], len(seats) // 2 - 2)
        soon, lasts = random.choice((0, 0, 1, 5)) * MILLISECOND, 60_000 * MILLISECOND
        parts = Trouble("partition", soon, (seats[0], lost, *others), for_us=lasts, point="grows")
        troubles = (Trouble("kill", at, (lost,)), parts)
    else:
        number, soon = random.choice((1, 2, 2)), random.choice((0, 1, 20)) * MILLISECOND
        pause = Trouble("pause", at, for_us=random.choice((3_000, 4_000, 5_000)) * MILLISECOND)
        troubles = (pause, Trouble("reset", soon, point="turned", number=number))
    policy = Policy(random.random() < 0.8, True, True, None)
    return Scenario(
        shape,
        costs_of(random, shape.stages),
        policy,
        24 if grows else 10,
        troubles,
        torn=seed,
        weather=random.choice((FAIR, UNEVEN, STORMY)),
        between=tuple((step, "pause") for step in range(1, 25 if grows else 11)),
        rejoin="always" if grows else "never",
        takes_over=True,
    )


def _trouble(shape: Topology, random: Random, at: int, number: int) -> Trouble:
    kind = random.choice((*PROCESSES, "coordinator", *HOSTS, HOSTS[0], "partition", "partition", "pause", "hold"))
    point, count = ("", 1)
    if number and random.random() < 0.6:  # during a takeover
        point, count = random.choice(POINTS), random.choice((1, 1, 1, 2, 3))
        at = random.choice((0, 0, 1, 20, 300)) * MILLISECOND
    elif random.random() < 0.2:
        point, at = random.choice(POINTS), random.choice((0, 1, 50)) * MILLISECOND
    lasts = random.choice((300, 1_200, 2_500, 4_000, 8_000, 60_000)) * MILLISECOND if kind not in PROCESSES else 0
    if kind in HOSTS:
        lasts = 0
    seats = list(shape.seats)
    most = random.choice((1, len(seats) // 2, len(seats) - 1))
    some = random.choice(((), tuple(random.sample(seats, most)))) if kind == "partition" else ()
    percent = random.choice((0, 100)) if kind == "hold" else 100
    return Trouble(kind, at, some, for_us=lasts, percent=percent, point=point, number=count)
