"""Jobs of sharded replicas, whose scripts run their own loops, drawn from seeds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator.drawn_troubles import CALM_US, KINDS, SETTLED_US, add_trouble, costs_of
from recycle_plugin.lab.simulator.message_delays import FAIR, STORMY, UNEVEN
from recycle_plugin.lab.simulator.scenario import Scenario, Trouble

PUSHES = 0.1  # share of all jobs
SHRINKS = 0.3  # share of these jobs
AROUND = (*((Op.REDUCE, "after"),) * 3, (Op.REDUCE, "before"), (Op.STEP, "before"), (Op.STEP, "after"))
NO_LINES = tuple(kind for kind in KINDS if kind not in ("drop", "delay"))  # nothing crosses from stage to stage


def with_pushing(given: Scenario, random: Random) -> Scenario:
    """Replace one in ten of the jobs without a slow replica by one of sharded replicas. In three of five lost ones come
    back, in half of the others scripts save, and in three of ten batches shrink.
    """
    if given.slow or random.random() >= PUSHES:
        return given
    shape, policy = Topology(random.randint(2, 4), 1, random.randint(1, 4)), Policy(split_backward=False)
    costs, steps, shards = costs_of(random, 1), random.randint(4, 6), random.choice((1, 2, 2, 3))
    troubles: list[Trouble] = []
    faults: list[Fault] = []
    around = random.random() < 0.5
    if around:  # a fault in the exchange: then some have the sum, and some have not
        op, when = random.choice(AROUND)
        where = str(Instruction(op, 0, None, random.randint(1, steps)))
        faults.append(Fault("kill", random.choice(shape.seats), when, where))
    for _ in range(random.choice((0, 0, 1) if around else (1, 1, 2, 2, 3))):
        add_trouble(random, shape, costs, policy, steps, troubles, faults, NO_LINES)
    job = Scenario(
        shape,
        costs,
        policy,
        steps,
        tuple(troubles),
        tuple(faults),
        given.torn,
        torn_share=random.choice((0.5, 1.0)),
        clip=random.choice((0.0, 25.0, 40.0)) * shards**0.5,
        weather=random.choice((FAIR, UNEVEN, UNEVEN, STORMY)),
        reloads=random.choice((0.0, 0.0, 0.0, 0.004)),
        shards=shards,
        struck=random.randrange(shards),
        unit="replica",
        pushes=True,
        dawdles=random.choice((0.0, 0.2, 0.6)),
    )
    job = _with_returns(job, random) if random.random() < 0.6 else _with_saves(job, random)
    means = tuple((step, "evaluate") for step in range(1, job.steps + 1) if random.random() < 0.3)
    policy = replace(policy, shrinks=random.random() < SHRINKS)
    by_hand = job.rejoin != "never" and random.random() < 0.5
    return replace(job, between=means + job.between, policy=policy, by_hand=by_hand)


def _with_saves(job: Scenario, random: Random) -> Scenario:
    """Let scripts save after some steps in half of the jobs, sometimes to full disks, and let a worker die in that."""
    if random.random() < 0.5:
        return job
    saved = [step for step in range(1, job.steps + 1) if random.random() < 0.5]
    places = [*map(str, job.shape.seats), "latest"]
    full = tuple((step, random.choice(places)) for step in saved if random.random() < 0.2)
    point = random.choice(("checkpoint.written", "checkpoint.publish", "checkpoint.named"))
    seat = random.choice(job.shape.seats) if point == "checkpoint.written" else job.shape.seats[0]
    faults = (Fault("kill", seat, "at", point),) if saved and random.random() < 0.5 else ()
    return replace(job, between=tuple((step, "save") for step in saved), full=full, faults=job.faults + faults)


def _with_returns(job: Scenario, random: Random) -> Scenario:
    """Have lost replicas come back, and in some of the jobs lose more of them meanwhile."""
    at, seat = random.randrange(SETTLED_US // 2, CALM_US // 2), random.choice(job.shape.seats)
    kills = [Trouble("kill", at, (seat,))]
    while random.random() < 0.4:
        at += random.randrange(CALM_US)
        kills.append(Trouble("kill", at, (random.choice((seat, random.choice(job.shape.seats))),)))
    return replace(
        job,
        troubles=(*job.troubles, *kills),
        steps=job.steps + random.choice((24, 36)),
        damaged_share=random.choice((0.0, 0.0, 0.3)),
        rejoin=random.choice(("always", "always", 2)),
    )
