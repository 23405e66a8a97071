"""SIGKILL from outside of the process at uniformly random times of the training; seeded."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.support.jobs import STEPS, assert_same_training

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
    """Ten runs with two kills each, the first one's both at the same instant; by default that one and half of the next."""
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


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(kills, id=named(kills), marks=() if number < 1 else pytest.mark.all_kills)
        for number, kills in enumerate(schedules())
    ],
)
def test_kills_from_outside(launch, reference, kills):
    run = launch()
    for when, seats in kills:
        kill_at(run, seats, when)
    lost = {seat for _, seats in kills for seat in seats}
    result = run.finish()
    assert_same_training(result, reference(), lost)


def test_there_are_twenty_kills():
    assert sum(len(seats) for kills in schedules() for _, seats in kills) == 20
