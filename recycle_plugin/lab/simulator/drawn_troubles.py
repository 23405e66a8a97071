"""Troubles of a job that is drawn from a seed, with their times; and the costs of its instructions."""

from __future__ import annotations

from random import Random

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Trouble
from recycle_plugin.planner import lowered, plan

CALM_US = 2_000 * MILLISECOND  # no trouble begins later
SETTLED_US = 500 * MILLISECOND  # all have reported that they are ready
KINDS = (
    *("kill",) * 8,
    *("named",) * 6,
    *("recovery",) * 4,
    "stop",
    "unfenced",
    "stuck",
    "slow",
    "drop",
    "delay",
    "delay",
    "cut",
    "many",
    "stall",
    "mute",
    "mute",
    "deaf",
    "leave",
    "leave",
    "end",
    "end",
    "rude",
    "rude",
)
POINTS = ("recovery.start:2", "recovery.report:2", "recovery.resume:2", "recovery.undone")


def costs_of(random: Random, stages: int) -> CostModel:
    """Draw the costs of the instructions of ``stages`` stages, in microseconds."""
    forward, inputs, weight = (tuple(random.randint(3, 9) * MILLISECOND for _ in range(stages)) for _ in range(3))
    closing = random.choice((0, 5 * MILLISECOND))
    return CostModel(
        forward, inputs, weight, communication=500, reduce=(closing,) * stages, step=(closing // 5,) * stages
    )


def add_trouble(
    random: Random,
    shape: Topology,
    costs: CostModel,
    policy: Policy,
    steps: int,
    troubles: list[Trouble],
    faults: list[Fault],
    kinds: tuple[str, ...] = KINDS,
) -> None:
    """Draw one of ``kinds``, its target and its time, and add it to ``troubles`` or ``faults``."""
    kind, seat = random.choice(kinds), random.choice(shape.seats)
    near = min((trouble.at_us for trouble in troubles), default=None)
    at = (
        random.randrange(CALM_US // 2)
        if near is None or random.random() < 0.5
        else near + random.randrange(60 * MILLISECOND)
    )
    match kind:
        case "named":
            program = lowered(plan(shape.full(), costs, policy), seat, random.randint(1, steps))
            faults.append(
                Fault(
                    random.choice(("kill", "kill", "stop")),
                    seat,
                    random.choice(("before", "after")),
                    str(random.choice(program)),
                )
            )
        case "recovery":
            troubles.append(Trouble("kill", at, (seat,)))
            point, _, number = random.choice(POINTS).partition(":")
            faults.append(Fault("kill", random.choice(shape.seats), "at", point, int(number or 1)))
        case "drop" | "delay":
            peer = random.choice([other for other in shape.seats if abs(other.stage - seat.stage) == 1])
            at = min(at, random.randrange(CALM_US // 4))  # early, so that a receiver is left
            troubles.append(Trouble(kind, at, (seat,), peer, random.choice((20, 200, 900, 1_800, 1_800)) * MILLISECOND))
        case "stop" | "unfenced":
            # unfenced: it wakes up after it was given up, when the others go on
            longest = 5_000 if kind == "stop" else 1_900
            troubles.append(Trouble(kind, at, (seat,), for_us=random.choice((50, 400, longest)) * MILLISECOND))
        case "slow":
            troubles.append(Trouble(kind, at, (seat,), percent=random.choice((130, 300))))
        case "many":  # most replicas at once; connections mostly tell before supervisors
            dead = random.sample(range(shape.replicas), min(shape.replicas // 2 + 1, shape.replicas - 1))
            troubles.append(Trouble("kill", at, tuple(seat for seat in shape.seats if seat.replica in dead)))
        case "stall":
            troubles.append(Trouble(kind, at, for_us=random.choice((50, 200, 600)) * MILLISECOND))
        case "mute" | "deaf":  # half of these workers die meanwhile
            lasts = random.choice((100, 400)) * MILLISECOND
            troubles.append(Trouble(kind, at, (seat,), for_us=lasts))
            if random.random() < 0.5:
                troubles.append(Trouble("kill", at + random.randrange(lasts), (seat,)))
        case "rude":
            last = Fault("kill", seat, "after", str(Instruction(Op.STEP, seat.stage, None, steps)))
            faults.append(last) if random.random() < 0.5 else troubles.append(Trouble(kind, 0, (seat,)))
        case "cut":
            most = min(len(shape.seats) // 2 + 1, len(shape.seats) - 1)  # somebody is left to go on, or to say why not
            troubles.append(Trouble(kind, at, tuple(random.sample(shape.seats, random.randint(1, most)))))
        case _:
            troubles.append(Trouble(kind, at, (seat,)))
