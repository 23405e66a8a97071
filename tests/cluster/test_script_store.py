"""A script's store is at the coordinator: keys, and waits under way, go on with whoever takes its place."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import Run
from tests.support.hosts import HostsRun
from tests.support.jobs import PLAIN, WRAPPED, Shape, after_step, assert_same_training, hold
from tests.support.launching import launching

FOUR = Shape(replicas=4, stages=1)  # a worker on each host


@pytest.fixture
def vehicle():
    return PLAIN


def wrap(folder: Path) -> str:
    return json.dumps([hold(folder), {"name": "keys", "folder": str(folder)}])


def early_key(run: Run, folder: Path) -> None:
    after_step(run, 4)
    run.wait_for((folder / "early").exists, "key that rank 0 has set")


def finds_all(run: Run, folder: Path, ranks: tuple[int, ...]) -> None:
    """Whether these ranks' waits end once the late key is set, and the early one is still there."""
    (folder / "set").touch()
    heard = [folder / f"heard.{rank}" for rank in ranks]
    run.wait_for(lambda: all(each.exists() for each in heard), "end of the waits")
    assert [each.read_text() for each in heard] == ["set by rank 0"] * len(ranks)


def test_it_outlives_the_coordinators_process(plain_server, reference, tmp_path):
    """... and rank 0, which has set a key of it."""
    with launching(plain_server, tmp_path, partial(Run, launcher="tasks"), PLAIN) as launch:
        run = launch(script=WRAPPED, RECYCLE_TEST_WRAP=wrap(tmp_path))
        early_key(run, tmp_path)
        run.hear("standby")
        children = psutil.Process(run.launcher.tasks[0].pid).children()
        (host,) = (each for each in children if each.name() == "recycle-host")
        host.kill()
        run.hear("coordinator")
        os.kill(run.pids()[0], signal.SIGKILL)
        run.hear("lost")
        finds_all(run, tmp_path, (1, 2, 3))
        (tmp_path / "go").touch()
        result = run.finish()
    assert_same_training(result, reference(), {result.seat_of(0)})


def test_it_goes_on_from_another_host(plain_server, four, reference, tmp_path):
    with launching(plain_server, tmp_path, partial(HostsRun, four), PLAIN) as launch:
        run = launch("recycle.heartbeat_timeout_s=3", script=WRAPPED, shape=FOUR, RECYCLE_TEST_WRAP=wrap(tmp_path))
        early_key(run, tmp_path)
        run.wait_for(lambda: [each for each in run.of("standby") if each.get("address")], "standby on another host")
        run.crash("alpha")
        run.hear("coordinator")
        finds_all(run, tmp_path, (1, 2, 3))
        (tmp_path / "go").touch()
        result = run.finish()
        for launcher in run.others.values():
            launcher.wait(90)
        four.mend("alpha")
    assert_same_training(result, reference(shape=FOUR), {"0.0"})


def test_nothing_of_it_listens(launch, reference, tmp_path):
    """All processes of a job are its guards and workers, and no rank has a store of torch's."""
    run = launch(script=WRAPPED, RECYCLE_TEST_WRAP=wrap(tmp_path))
    early_key(run, tmp_path)
    assert run.forked() == {*run.pids().values()}
    finds_all(run, tmp_path, (1, 2, 3))
    (tmp_path / "go").touch()
    assert_same_training(run.finish(), reference())
