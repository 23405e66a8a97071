"""The coordinator's process is killed again and again, at any moment, beside what else happens in a job."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.support.cluster import Run
from tests.support.jobs import WRAPPED, Vehicle, after_step, assert_same_training, hold
from tests.support.launching import launching

pytestmark = pytest.mark.plain_too
KILLS = 4


@pytest.fixture
def start(request: pytest.FixtureRequest, vehicle: Vehicle, tmp_path: Path):
    """Jobs whose ranks are started as srun does it: with a guard for each."""
    server = request.getfixturevalue(vehicle.server)
    with launching(server, tmp_path, partial(Run, launcher="tasks"), vehicle) as launch:
        yield launch


def kill_coordinator(run: Run, number: int) -> float:
    """Kill it once another process stands by, for the ``number``-th time; the seconds until that goes on."""
    run.hear("standby", number)
    children = psutil.Process(run.launcher.tasks[0].pid).children()
    (host,) = [child for child in children if child.name() == "recycle-host"]
    began = time.monotonic()
    host.kill()
    run.hear("coordinator", number)
    return time.monotonic() - began


def test_whatever_else_happens(start, reference, pytestconfig, tmp_path):
    """A worker is lost, comes back, and is a member again; the weights are those of a job without a failure."""
    random = Random(pytestconfig.getoption("--kill-seed"))
    run = start(
        "recycle.rejoin=always", script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(hold(tmp_path) | {"before": "0F0.0@6"})
    )
    lost = random.choice((1, 2, 3))
    after_step(run, 4)
    took = [kill_coordinator(run, 1)]
    after_step(run, 5)
    os.kill(run.pids()[lost], signal.SIGKILL)
    for number in range(2, KILLS + 1):
        time.sleep(random.random())  # no race is waited out: it may come at any moment
        took.append(kill_coordinator(run, number))
    run.hear("caught_up")
    (tmp_path / "go").touch()
    result = run.finish()
    print("seconds until another coordinator goes on:", " ".join(f"{each:.3f}" for each in took))
    assert_same_training(result, reference(), {result.seat_of(lost)})
    assert len(result.of("coordinator")) == KILLS and result.of("rejoined")
