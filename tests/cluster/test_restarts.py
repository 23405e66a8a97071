"""Lost workers are started again beside those that train, who notice nothing of it."""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest

from tests.cluster.conftest import Launch
from tests.support.cluster import Run
from tests.support.jobs import WRAPPED, after_step, assert_same_training, hold

pytestmark = pytest.mark.plain_too


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
