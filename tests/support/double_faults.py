"""Kills close together, seeded: at named instructions, at points of recovery and from outside."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.planner import lowered, plan
from tests.support.cluster import Result, Run
from tests.support.jobs import STEPS, WRAPPED, Shape, faults, held

SHAPES = (Shape(4, 2, 2), Shape(3, 3, 3))
VARIANTS = (
    (),
    ("gradient_clipping=0.5",),
    ("recycle.split_backward=false",),
    ("recycle.undo=inverse",),
    ("recycle.keep_bytes=1",),
)
POINTS = ("recovery.start:2", "recovery.report:2", "recovery.resume:2", "recovery.undone")
APART_S = 0.15  # at most, of a kill from outside after the one before


@dataclass(frozen=True)
class Scenario:
    """``named``: faults in their text form.

    ``outside``: who is killed from outside, how many seconds after the first of them strikes.
    """

    shape: Shape
    variant: tuple[str, ...]
    named: tuple[str, ...]
    outside: tuple[str, float] | None


def scenario(seed: int) -> Scenario:
    """Two kills, or three where four replicas leave room for them; every variant of the job takes its turn."""
    random = Random(seed)
    shape, variant = SHAPES[seed % 2], VARIANTS[seed // 2 % len(VARIANTS)]
    seats = [str(seat) for seat in Topology(shape.replicas, shape.stages, shape.micro_batches).seats]
    first, *others = random.sample(seats, 3 if shape.replicas > 3 and random.random() < 0.4 else 2)
    step = random.randint(4, 12)
    named, outside = [at(random, shape, variant, first, step)], None
    for seat in others:
        kind = random.choice(("same step", "next step", "recovery", "recovery", "outside"))
        if kind == "outside" and outside is None:
            outside = seat, random.uniform(0, APART_S)
        elif kind == "recovery":
            named.append(f"kill {seat} at {random.choice(POINTS)}")
        else:
            named.append(at(random, shape, variant, seat, step + (kind == "next step")))
    return Scenario(shape, variant, tuple(named), outside)


def at(random: Random, shape: Shape, variant: tuple[str, ...], seat: str, step: int) -> str:
    """A kill at an instruction of the seat's program as long as nobody is lost."""
    return f"kill {seat} {random.choice(('before', 'after'))} {random.choice(program(shape, variant, seat, step))}"


def program(shape: Shape, variant: tuple[str, ...], seat: str, step: int) -> tuple[Instruction, ...]:
    policy = Policy(
        split_backward="recycle.split_backward=false" not in variant, validate="gradient_clipping=0.5" in variant
    )
    view = Topology(shape.replicas, shape.stages, shape.micro_batches).full()
    return lowered(plan(view, CostModel.uniform(shape.stages, 1000, 1000, 1000), policy), Seat.parse(seat), step)


def kill_all(launch, folder: Path, given: Scenario, *more: str, others: tuple[dict, ...] = ()) -> Result:
    """The job's result; it does not end before all are killed."""
    wraps = ([held(folder, STEPS - 1, "killed")] if given.outside else []) + list(others)
    run = launch(faults(*given.named), *more, shape=given.shape, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(wraps))
    if given.outside is not None:
        kill_from_outside(run, *given.outside)
        (folder / "killed").touch()
    return run.finish()


def kill_from_outside(run: Run, seat: str, after_s: float) -> None:
    """Once a first fault has struck."""
    run.hear("fault")
    time.sleep(after_s)
    os.kill(run.pid_of(seat), signal.SIGKILL)
