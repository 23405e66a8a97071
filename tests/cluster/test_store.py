"""The end of the key-value store's process is the end of the job: at once, with one line, and with nothing left
running.
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.support.jobs import WRAPPED, after_step, assert_one_line, faults

pytestmark = pytest.mark.plain_too

LINE = "the job ends: the key-value store's process was killed by signal 9"


@pytest.mark.plain_too(deepspeed=False)
def test_while_training(launch):
    run = launch("steps=100000")
    after_step(run, 4)
    os.kill(run.store_pid(), signal.SIGKILL)
    result = run.finish()
    assert_one_line(result, LINE)
    assert not result.of("lost") and not result.records


def test_while_training_goes_on_without_a_worker(launch):
    """Survivors have met in a new generation through the store."""
    run = launch("steps=100000", faults("kill 0.1 before 1F0.1@3"))
    after_step(run, 6)
    os.kill(run.store_pid(), signal.SIGKILL)
    result = run.finish()
    assert_one_line(result, LINE)
    assert [event["seat"] for event in result.of("lost")] == ["0.1"] and not result.records


@pytest.mark.plain_too(deepspeed=False)
def test_before_the_workers_have_met(launch, tmp_path):
    """They are about to."""
    flags = [tmp_path / f"rank{rank}" for rank in range(4)]
    wraps = [
        {"name": "strike_at", "moment": "meeting", "rank": rank, "flag": str(flag)} for rank, flag in enumerate(flags)
    ]
    run = launch(script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(wraps))
    run.wait_for(lambda: all(flag.exists() and flag.read_text() for flag in flags), "workers")
    (store,) = run.forked() - {int(flag.read_text()) for flag in flags}
    os.kill(store, signal.SIGKILL)
    result = run.finish()
    assert_one_line(result, LINE)
    assert not result.of("start") and not result.records
