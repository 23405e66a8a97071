"""The coordinator's host dies where no process can take its place: all others say so, and end."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial

import psutil
import pytest

from tests.support.hosts import HostsRun, hosts
from tests.support.jobs import PLAIN, WRAPPED, Shape, after_step, hold
from tests.support.launching import launching

DEADLINE = "recycle.heartbeat_timeout_s=2"
GONE = "recycle: the job ends: the coordinator's host is gone, and no other process has taken its place"
UNHEARD = "has heard nothing from the coordinator for 16 s, so the others may have gone on without it"
POWER = ("crashes", "loses power")
# of a worker that finds nobody, and of its supervisor: 30 s of silence, 10 s each, and 15 s for a signal; 60 s of
# silence for the coordinator, and as long for a supervisor that looks for it
END_S = 120


@pytest.fixture
def start(plain_server, tmp_path):
    """``start(hosts, *wraps)``: a job with a worker on each of the ``hosts``."""
    with ExitStack() as jobs:

        def launch(hosts, *wraps: dict) -> HostsRun:
            started = jobs.enter_context(launching(plain_server, tmp_path, partial(HostsRun, hosts), PLAIN))
            jobs.callback(hosts.mend, hosts.names[0])
            shape = Shape(len(hosts.names), 1)
            return started(DEADLINE, script=WRAPPED, shape=shape, RECYCLE_TEST_WRAP=json.dumps(wraps))

        yield launch


def are_connected(run, hosts) -> bool:
    """Whether all workers and supervisors speak with the coordinator, and the process that stands by on its host."""
    ends = hosts.connections(hosts.names[0])
    return len([here for here, _ in ends if here == run.port]) == 2 * len(hosts.names) + 1


def all_end(run, hosts, loses_power: bool, said_why: str = GONE, crashed: int = 1) -> None:
    """Crash the first host, or the first ``crashed`` ones; every process on the others ends, with a line from each
    worker. ``loses_power``: no connection to the first host is closed.
    """
    first, others = hosts.names[0], hosts.names[crashed:]
    if loses_power:
        hosts.cut(first)
    for name in hosts.names[:crashed]:
        run.crash(name)
    assert run.launcher.wait(END_S) != 0
    assert all(launcher.wait(END_S) != 0 for launcher in run.others.values())
    for name in others:
        said = run.said_on(name)
        assert said.count(said_why) == 1 and "Traceback" not in said, said[-4000:]


@pytest.mark.parametrize("loses_power", (False, True), ids=POWER)
def test_of_two_hosts_the_other_one_ends(start, pair, tmp_path, loses_power):
    run = start(pair, hold(tmp_path))
    after_step(run, 4)
    assert "single point of failure: host alpha runs the coordinator; its loss ends the job" in run.output
    all_end(run, pair, loses_power, UNHEARD if loses_power else GONE)


@pytest.mark.parametrize("loses_power", (False, True), ids=POWER)
def test_before_the_first_step_all_others_end(start, four, tmp_path, loses_power):
    """No process of another host stands by yet: scripts have not begun."""
    run = start(four, {"name": "begin_late", "until": str(tmp_path / "go")})
    run.wait_for(lambda: are_connected(run, four), "connection of each process")
    all_end(run, four, loses_power)


def test_where_the_standbys_host_dies_too_all_others_end(start, four, tmp_path):
    run = start(four, hold(tmp_path))
    after_step(run, 4)
    run.wait_for(lambda: [each for each in run.of("standby") if "10.77.0.2:" in each.get("address", "")], "standby")
    all_end(run, four, False, crashed=2)


def test_where_nobody_else_is_left_before_the_first_step_the_coordinator_ends(plain_server, tmp_path):
    """Nor a network, so that no connection is closed; what is left on its host is the guard, which waits for it."""
    with hosts() as two, launching(plain_server, tmp_path, partial(HostsRun, two), PLAIN) as launch:
        late = json.dumps([{"name": "begin_late", "until": str(tmp_path / "go")}])
        run = launch(DEADLINE, script=WRAPPED, shape=Shape(2, 1), RECYCLE_TEST_WRAP=late)
        run.wait_for(lambda: are_connected(run, two), "connection of each process")
        here = psutil.Process(run.launcher.pid).children(recursive=True)
        (host,) = (process for process in here if process.name() == "recycle-host")
        two.unplug("alpha")
        two.crash("beta")
        for process in here:
            if process.name() not in ("recycle-host", "recycle-guard"):
                process.kill()
        assert run.launcher.wait(END_S) != 0 and not host.is_running()
    assert "before training started" in run.output, run.output[-4000:]
