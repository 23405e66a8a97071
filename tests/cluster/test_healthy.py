"""Nobody who is healthy is given up: times that vary fivefold, a slow first step, pauses for data of ten steps and more, checkpoints, and workers that
are stopped for half a step, under deadlines shorter than the defaults.  ``--healthy-steps N`` makes it a longer job."""

from __future__ import annotations

import json
import os
import signal
import time
from random import Random
from statistics import median

import pytest

from tests.support.jobs import WRAPPED, Emulated, after_step, held

pytestmark = pytest.mark.plain_too(deepspeed=False)

DEADLINE_S = 2.0  # for instructions, and for hosts
UNIT_S, TIMES = 0.003, 5.0
SHAPE = Emulated(micro_batches=4, each_ms=1)
WARM = 6  # steps until the first stop
EACH, APART = 100, 10  # steps from pause to pause, from stop to stop


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "steps" in metafunc.fixturenames:
        steps = metafunc.config.getoption("--healthy-steps")
        metafunc.parametrize("steps", [pytest.param(steps, marks=pytest.mark.timeout(600 + steps))])


def test_nobody_who_is_healthy_is_given_up(launch, tmp_path, steps):
    uneven = {"name": "restless", "unit_s": UNIT_S, "times": TIMES, "first_s": 2 * DEADLINE_S}
    uneven |= {"pauses": list(range(steps // 2, steps, EACH)), "pause_s": 1.5 * DEADLINE_S}
    wraps = [uneven, {"name": "save_each", "folder": str(tmp_path / "saved"), "steps": max(steps // 4, 1)}, held(tmp_path, steps, "stopped")]
    deadlines = f"recycle.progress_timeout_s={DEADLINE_S}", f"recycle.heartbeat_timeout_s={DEADLINE_S}"
    run = launch(f"steps={steps}", *deadlines, shape=SHAPE, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(wraps))
    stops = 0
    for step in range(WARM, steps - APART, APART):
        after_step(run, step)
        stop_for_half_a_step(run, Random(step))
        stops += 1
    (tmp_path / "stopped").touch()
    result = run.finish(120 + steps)
    lengths = intervals(result.events)
    print(f"{steps} steps, {stops} stops, {len(result.of('checkpoint'))} checkpoints; steps of {min(lengths):.3f} to {max(lengths):.3f} s, median {median(lengths):.3f} s")
    assert not result.of("lost") and len(result.of("resume")) == 1, result.output[-6000:]
    assert result.code == 0 and len(result.losses) == steps and len(result.of("checkpoint")) == 4 and len(result.records) == SHAPE.ranks
    assert max(lengths) > uneven["pause_s"]


def stop_for_half_a_step(run, random: Random) -> None:
    pid = random.choice(sorted(run.pids().values()))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(median(intervals(run.events())) / 2)
    os.kill(pid, signal.SIGCONT)


def intervals(events: list[dict]) -> list[float]:
    commits = [event["time"] for event in events if event["event"] == "committed"]
    return [later - earlier for earlier, later in zip(commits, commits[1:])]
