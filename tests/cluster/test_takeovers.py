"""The coordinator's process is killed again and again, at any moment, beside what else happens in a job."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import TextIO

import psutil
import pytest

from tests.support.cluster import Run, Tasks, WarmLauncher
from tests.support.jobs import WRAPPED, Vehicle, after_step, assert_same_training, hold
from tests.support.launching import launching

pytestmark = pytest.mark.plain_too
KILLS = 4


class LateRun(Run):
    """Whose ranks are started as srun does it, with a guard for each, but for the last one if it is ``late``: until
    :meth:`start_last`.
    """

    def __init__(self, *arguments: object, late: bool = False, **options: object) -> None:
        self._late = late
        super().__init__(*arguments, launcher="tasks", **options)

    def _tasks(self, ranks: int, program: list[str], variables: dict[str, str], output: TextIO) -> Tasks:
        module, *script = program
        *others, last = self._places(ranks, variables)
        first = [WarmLauncher(self._server, module, script, place, output) for place in others]
        self._last = partial(WarmLauncher, self._server, module, script, last)
        return Tasks(first if self._late else [*first, self._last(output)])

    def start_last(self) -> None:
        with self._output.open("a") as output:
            self.launcher.tasks.append(self._last(output))


@pytest.fixture
def start(request: pytest.FixtureRequest, vehicle: Vehicle, tmp_path: Path):
    server = request.getfixturevalue(vehicle.server)
    with launching(server, tmp_path, LateRun, vehicle) as launch:
        yield launch


def processes(run: Run, name: str) -> list[psutil.Process]:
    return [child for child in psutil.Process(run.launcher.tasks[0].pid).children() if child.name() == name]


def kill_coordinator(run: Run, number: int) -> float:
    """Kill it once another process stands by, for the ``number``-th time; the seconds until that goes on."""
    run.hear("standby", number)
    (host,) = processes(run, "recycle-host")
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


def are_connected(run: Run) -> bool:
    """Whether all that has been started speaks with the coordinator: workers, supervisors, who stands by."""
    (host,) = processes(run, "recycle-host")
    ends = [each for each in host.net_connections("tcp") if each.raddr and each.laddr.port == run.port]
    return len(ends) == 2 * len(run.launcher.tasks) + 1


def stands_by_again(run: Run) -> bool:
    """Whether a process stands by since the takeover: the first may not have come to say so."""
    kinds = [event["event"] for event in run.events()]
    return "standby" in kinds[kinds.index("coordinator") :]


def test_before_the_start_and_once_all_is_over(start, reference, tmp_path):
    """What was said by then is told, the run folder is this job's, and the exit code is what it was."""
    run = start(late=True, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(hold(tmp_path)))
    run.wait_for(lambda: processes(run, "recycle-standby") and are_connected(run), "all that was started")
    (host,) = processes(run, "recycle-host")
    host.kill()
    run.wait_for(lambda: host.pid not in [each.pid for each in processes(run, "recycle-host")], "its end")
    run.start_last()
    run.hear("coordinator")
    run.wait_for(lambda: stands_by_again(run), "process that stands by for the next coordinator")
    (following,) = processes(run, "recycle-host")
    assert f"process {following.pid} on host" in (run.folder / ".recycle-lock").read_text()
    (tmp_path / "go").touch()
    run.hear("finished")
    following.kill()
    result = run.finish()
    assert_same_training(result, reference())
    assert sorted(event["rank"] for event in result.of("worker")) == [0, 1, 2, 3]
