"""The end of the key-value store's process is the end of the job: at once, with one line, and with nothing left running."""

from __future__ import annotations

import os
import signal

from tests.support.jobs import after_step, assert_one_line, faults

LINE = "the job ends: the key-value store's process was killed by signal 9"


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


def test_before_the_workers_have_met(launch):
    """A cold run, whose workers are still importing."""
    run = launch(cold=True)
    os.kill(run.wait_for(run.store_pid, "process of the store"), signal.SIGKILL)
    result = run.finish()
    assert_one_line(result, LINE)
    assert not result.of("start") and not result.records
