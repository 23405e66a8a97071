"""Nobody who is healthy is given up: times that vary fivefold, a slow first step, pauses for data of ten steps and
more, checkpoints, and workers that are stopped for half a step, under deadlines shorter than the defaults.
``--healthy-steps N`` makes it a longer job, and from 1,000 on what happens in it takes four times as long, under the
default deadlines.
"""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from random import Random
from statistics import median

import psutil
import pytest

from recycle_plugin.settings.schema import Settings
from tests.support.cluster import Run
from tests.support.jobs import PLAIN, WRAPPED, Emulated, after_step, held
from tests.support.launching import launching

pytestmark = pytest.mark.plain_too(deepspeed=False)

DEADLINE_S = 2.0  # for instructions, and for hosts
UNIT_S, TIMES = 0.003, 5.0
SHAPE = Emulated(micro_batches=4, each_ms=1)
WARM = 6  # steps until the first stop
EACH, APART = 100, 10  # steps from pause to pause, from stop to stop
LONG = 1000  # steps of a long job
SOON = 100  # steps that a test may wait for


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "steps" in metafunc.fixturenames:
        steps = metafunc.config.getoption("--healthy-steps")
        metafunc.parametrize("steps", [pytest.param(steps, marks=pytest.mark.timeout(600 + steps))])


def test_nobody_who_is_healthy_is_given_up(launch, tmp_path, steps):
    uneven = {"name": "restless", "unit_s": UNIT_S, "times": TIMES, "first_s": 2 * DEADLINE_S}
    uneven |= {"pauses": list(range(steps // 2, steps, EACH)), "pause_s": 1.5 * DEADLINE_S}
    wraps = [
        uneven,
        {"name": "save_each", "folder": str(tmp_path / "saved"), "steps": max(steps // 4, 1)},
        held(tmp_path, steps, "stopped"),
    ]
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
    print(
        f"{steps} steps, {stops} stops, {len(result.of('checkpoint'))} checkpoints; steps of {min(lengths):.3f} to "
        f"{max(lengths):.3f} s, median {median(lengths):.3f} s"
    )
    assert not result.of("lost") and len(result.of("resume")) == 1, result.output[-6000:]
    assert result.code == 0 and len(result.losses) == steps and len(result.of("checkpoint")) == 4
    assert len(result.records) == SHAPE.ranks
    assert max(lengths) > uneven["pause_s"]


def stop_for_half_a_step(run, random: Random) -> None:
    pid = random.choice(sorted(run.pids().values()))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(median(intervals(run.events())) / 2)
    os.kill(pid, signal.SIGCONT)


def intervals(events: list[dict]) -> list[float]:
    commits = [event["time"] for event in events if event["event"] == "committed"]
    return [later - earlier for earlier, later in zip(commits, commits[1:])]


@pytest.fixture
def start(plain_server, tmp_path):
    with launching(plain_server, tmp_path, partial(Run, launcher="tasks"), PLAIN) as launch:
        yield launch


def test_what_happens_in_the_life_of_a_job_costs_nobody(start, tmp_path, steps):
    """Pools and loaders with workers, a micro-batch of 7 s, asleep and computing, a pause of 4 s of a host, and one of
    10 s of the coordinator's process: or, in a short job, of a quarter of that, under a quarter of the deadlines.
    """
    share = 1.0 if steps >= LONG else 0.25
    deadlines = [
        f"recycle.{name}={share * getattr(Settings(), name)}"
        for name in ("heartbeat_timeout_s", "progress_timeout_s", "busy_timeout_s")
    ]
    uneven = {"name": "restless", "unit_s": UNIT_S, "times": TIMES, "first_s": 0.1, "pauses": [], "pause_s": 0}
    heavy = [
        {
            "name": "linger",
            "seat": "",
            "seconds": 7 * share,
            "step": steps * 3 // 4 + place,
            "only": f"1F0.0@{steps * 3 // 4 + place}",
            "computes": computes,
        }
        for place, computes in enumerate((False, True))
    ]
    wraps = [uneven, *heavy, {"name": "helped", "every": max(steps // 20, 8)}, held(tmp_path, steps, "paused")]
    run = start(f"steps={steps}", *deadlines, shape=SHAPE, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(wraps))
    middle = min(steps // 2, SOON)
    after_step(run, middle)
    guards = [task.pid for task in run.launcher.tasks]
    paused([*named(guards[3], "recycle-super"), psutil.Process(run.pids()[3])], 4 * share)
    after_step(run, middle + 3)
    paused(named(guards[0], "recycle-host"), 10 * share)
    (tmp_path / "paused").touch()
    result = run.finish(120 + steps)
    lengths = intervals(result.events)
    print(
        f"{steps} steps of {min(lengths):.3f} to {max(lengths):.3f} s, {len(result.of('suspected'))} suspicions, "
        f"{len(result.of('cleared'))} cleared"
    )
    assert result.code == 0 and not result.of("lost") and len(result.of("resume")) == 1, result.output[-6000:]
    assert len(result.losses) == steps and max(lengths) > 7 * share
    assert len(result.of("suspected")) == len(result.of("cleared"))


def named(guard: int, name: str) -> list[psutil.Process]:
    return [child for child in psutil.Process(guard).children() if child.name() == name]


def paused(processes: list[psutil.Process], seconds: float) -> None:
    for process in processes:
        process.suspend()
    time.sleep(seconds)
    for process in processes:
        process.resume()
