"""SIGKILL from outside of the process at uniformly random times of the training; seeded.

The job does not end before the last of them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.jobs import STEPS, WRAPPED, assert_same_training, held

pytestmark = pytest.mark.plain_too

SEATS = [("0.0", "1.0"), ("0.1", "1.1")]  # of a stage, one at most may die


def committed(run) -> list[dict]:
    return [event for event in run.events() if event["event"] == "committed"]


def kill_at(run, seats: list[str], when: float) -> None:
    """At ``when`` steps after the start, in units of the run's own last step: 7.3 is a good fourth into step 8."""
    whole, part = divmod(when, 1)
    done = run.wait_for(lambda: len(commits := committed(run)) >= max(2, whole) and commits, f"{whole:.0f} commits")
    time.sleep(part * (done[-1]["time"] - done[-2]["time"]))
    (start,) = [event for event in run.events() if event["event"] == "start"]
    pids = [run.pids()[start["seats"][seat]] for seat in seats]
    for pid in pids:
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
    """The job's result."""
    run = launch(*more, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps([held(folder, STEPS - 1, "killed"), *others]))
    for when, seats in kills:
        kill_at(run, seats, when)
    (folder / "killed").touch()
    return run.finish()


@pytest.mark.some_of(2)
@pytest.mark.parametrize("kills", [pytest.param(kills, id=named(kills)) for kills in schedules()])
def test_kills_from_outside(launch, reference, tmp_path, kills):
    result = kill_all(launch, tmp_path / "gate", kills)
    lost = {seat for _, seats in kills for seat in seats}
    assert_same_training(result, reference(), lost)


def test_there_are_twenty_kills():
    assert sum(len(seats) for kills in schedules() for _, seats in kills) == 20
