"""Lost workers are started again beside those that train, who notice nothing of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import psutil
import pytest

from recycle_plugin.lab.runs import MARK, environment
from tests.support.cluster import ROOT, Run
from tests.support.jobs import PLAIN, SQUARE, WRAPPED, after_step, assert_same_training, hold
from tests.support.launching import Launch, launching

pytestmark = pytest.mark.plain_too
PATIENCE_S = 60


def started_again(run: Run, rank: int, incarnation: int) -> dict:
    """Its event, once the process has connected."""
    return run.wait_for(
        lambda: next(
            (
                event
                for event in run.events()
                if (event["event"], event.get("rank"), event.get("incarnation")) == ("worker", rank, incarnation)
            ),
            None,
        ),
        f"process {incarnation} of rank {rank}",
    )


def test_its_own_supervisor_starts_it_and_the_others_train_as_if_it_had_stayed_away(
    launch: Launch, reference, tmp_path
):
    """Killed in training, and then before it was admitted."""
    wrap = json.dumps(hold(tmp_path))
    run = launch("recycle.rejoin=always", script=WRAPPED, RECYCLE_TEST_WRAP=wrap)
    after_step(run, 4)
    os.kill(run.pids()[3], signal.SIGKILL)
    first = started_again(run, 3, 1)
    os.kill(first["pid"], signal.SIGKILL)
    second = started_again(run, 3, 2)
    (tmp_path / "go").touch()
    result = run.finish()
    assert_same_training(result, reference(), {result.seat_of(3)})
    assert [(event["after_s"], event["in_vain"]) for event in result.of("restart")] == [(1.0, 0), (2.0, 1)]
    assert not psutil.pid_exists(second["pid"]) or psutil.Process(second["pid"]).status() == psutil.STATUS_ZOMBIE
    assert len(result.of("lost")) == 1 and not result.of("late")


@pytest.mark.plain_too(deepspeed=False)
def test_another_host_takes_the_seat_of_one_whose_guard_was_killed(plain_server, reference, tmp_path):
    """By the command that a user writes; a second one is a spare, and ends with the job."""
    wrap = {"RECYCLE_TEST_WRAP": json.dumps(hold(tmp_path))}
    with launching(plain_server, tmp_path, partial(Run, launcher="tasks"), PLAIN) as launch:
        run = launch(script=WRAPPED, **wrap)
        after_step(run, 4)
        os.kill(run.launcher.tasks[2].pid, signal.SIGKILL)
        run.hear("lost")
        script = [PLAIN.wrapped, *PLAIN.arguments(SQUARE, run.folder)]
        command = [sys.executable, "-m", "recycle_plugin.launch", "--join", f"127.0.0.1:{run.port}", *script]
        variables = environment(**{MARK: run.mark, "RECYCLE_FORK_SERVER": plain_server.path} | wrap)
        joined = []
        for kind in ("joined", "spare"):
            joined.append(subprocess.Popen(command, cwd=ROOT, env=variables))
            run.hear(kind)
        started_again(run, 2, 1)
        (tmp_path / "go").touch()
        result = run.finish()
        assert [process.wait(PATIENCE_S) for process in joined] == [0, 0]
    assert result.code == 128 + signal.SIGKILL
    assert_same_training(replace(result, code=0), reference(), {result.seat_of(2)})
    assert not result.of("stranger"), "all that the one that has joined says of its worker is its own to say"
