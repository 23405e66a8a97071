"""Kills of a job's workers at named instructions, and from outside at random times."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from recycle_plugin.core.vocabulary.faults import Fault
from tests.support.jobs import STEPS, WRAPPED, Shape, held

OPS = {
    0: ("LOAD", "F", "SA", "RG", "I", "W", "REDUCE", "STEP"),
    1: ("LOAD", "RA", "F", "I", "SG", "W", "REDUCE", "STEP"),
}
MOMENTS = {stage: [f"{when} {op}" for op in ops for when in ("before", "after")] for stage, ops in OPS.items()}
FIRST, SECOND = 5, 12  # the steps of a run's two kills, one for each stage


@dataclass(frozen=True)
class Kill:
    """Of the worker at ``seat`` at a moment such as ``before F`` of its own second micro-batch."""

    seat: str
    moment: str

    def at(self, step: int) -> str:
        replica, stage = self.seat.split(".")
        when, op = self.moment.split()
        micro_batch = "" if op in ("REDUCE", "VALIDATE", "STEP") else f"{replica}.1"
        way = {"SA": ">", "SG": ">", "RA": "<", "RG": "<"}.get(op)
        peer = f"{way}{replica}.{1 - int(stage)}" if way else ""
        return f"kill {self.seat} {when} {stage}{op}{micro_batch}{peer}@{step}"

    def __str__(self) -> str:
        return f"{self.seat} {self.moment}"


def matrix() -> list[tuple[Kill, Kill]]:
    """Every seat of 2 x 2 at every moment, two kills a run: one in each stage, the second while degraded."""
    pairs = []
    for number, moment in enumerate(MOMENTS[0]):
        for seats in (("0.0", "1.1"), ("1.0", "0.1")):
            kills = Kill(seats[0], moment), Kill(seats[1], MOMENTS[1][(number + 5) % len(MOMENTS[1])])
            pairs.append(kills if number % 2 == 0 else kills[::-1])
    return pairs


CLIPPED, FUSED = "gradient_clipping=0.5", "recycle.split_backward=false"


def struck(result) -> set[str]:
    return {str(Fault.parse(event["fault"])) for event in result.of("fault")}


def one_stage_ahead(folder, ahead: int, step: int, replicas: int = 2) -> dict[str, str]:
    """Environment of a job in which stage ``ahead`` has stepped, and the other has not, when the other's REDUCE
    begins.
    """
    behind = 1 - ahead
    gate = {
        "name": "gate",
        "folder": str(folder / "gate"),
        "before": f"{behind}REDUCE@{step}",
        "until": f"{ahead}STEP@{step}",
    }
    return {"RECYCLE_TEST_WRAP": json.dumps(gate | {"by": [f"{replica}.{ahead}" for replica in range(replicas)]})}


THREE = Shape(replicas=3)


def replica_lost(ahead: int) -> tuple[str, str]:
    """Both workers of replica 0 die while one stage is ahead: nobody has their boundary tensors any more, and to make
    them again the stage that is ahead has to take its step back.
    """
    return f"kill 0.{ahead} after {ahead}STEP@7", f"kill 0.{1 - ahead} before {1 - ahead}REDUCE@7"


CONTROLS = {
    "one micro-batch dropped": {"name": "scale_micro_batch", "micro_batch": "0.1", "step": 10, "factor": 0},
    "one micro-batch doubled": {"name": "scale_micro_batch", "micro_batch": "0.1", "step": 10, "factor": 2},
    "division by the live workers": {"name": "divide_by_live"},
    "another dropout mask": {"name": "masks_by_worker"},
}
SEATS = [("0.0", "1.0"), ("0.1", "1.1")]  # of a stage, one at most may die


def kill_at(run, seats: list[str], when: float) -> None:
    """At ``when`` steps after the start, in units of the run's own last step: 7.3 is a good fourth into step 8."""
    whole, part = divmod(when, 1)
    done = run.hear("committed", max(2, int(whole)))
    time.sleep(part * (done[-1]["time"] - done[-2]["time"]))
    for pid in [run.pid_of(seat) for seat in seats]:
        os.kill(pid, signal.SIGKILL)


def schedules() -> list:
    """Ten runs with two kills each, the first one's both at the same instant; of the second one each by itself."""
    rng = random.Random(20260)
    runs = []
    for number in range(10):
        seats = [rng.choice(stage) for stage in rng.sample(SEATS, 2)]
        times = sorted(rng.uniform(2, STEPS - 2) for _ in seats)
        kills = [(times[0], seats)] if number == 0 else [(when, [seat]) for when, seat in zip(times, seats)]
        runs.append(kills[:1] if number == 1 else kills)
        if number == 1:
            runs.append(kills[1:])
    return runs


def named(kills: list[tuple[float, list[str]]]) -> str:
    return "; ".join(f"{'+'.join(seats)} at {when:.2f}" for when, seats in kills)


def kill_all(launch, folder: Path, kills: list[tuple[float, list[str]]], *more: str, others: tuple[dict, ...] = ()):
    run = launch(*more, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps([held(folder, STEPS - 1, "killed"), *others]))
    for when, seats in kills:
        kill_at(run, seats, when)
    (folder / "killed").touch()
    return run.finish()
