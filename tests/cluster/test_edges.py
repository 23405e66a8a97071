"""The edges of a job: deaths before its first step, in it, in the last one and after it, and SIGTERM to everything at
once.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

from recycle_plugin.lab.runs import processes_with
from recycle_plugin.observability.event_log import EVENTS, read_events
from tests.support.jobs import (
    STEPS,
    after_step,
    assert_one_line,
    assert_same_training,
    difference,
    early_folder,
    faults,
    strike_at,
)


@pytest.mark.some_of(2)
@pytest.mark.plain_too
@pytest.mark.parametrize("moment, rank", (("meeting", 0), ("initialize", 2), ("enrolling", 3)))
def test_a_death_before_the_first_step_ends_the_job(launch, moment, rank):
    """There is nothing to go on with: others may be in the middle of what DeepSpeed does with all of them."""
    result = launch(**strike_at(moment, rank)).finish()
    assert_one_line(
        result,
        f"the job ends: rank {rank}: its process was killed by signal 9 (SIGKILL) before training started: start the "
        "job again",
    )
    with early_folder(result) as folder:
        (end,) = [event for event in read_events(folder / EVENTS) if event["event"] == "end"]
    assert end["killed"] == rank and not result.records


@pytest.mark.plain_too(deepspeed=False)
def test_deaths_in_the_first_step(launch, reference):
    """One before anybody has run anything."""
    kills = "kill 0.1 at recovery.report", "kill 1.0 after 0STEP@1"
    result = launch(faults(*kills)).finish()
    assert_same_training(result, reference(), {"0.1", "1.0"})
    assert {event["fault"] for event in result.of("fault")} == set(kills)


@pytest.mark.plain_too(deepspeed=False)
def test_a_death_in_the_last_step(launch, reference):
    result = launch(faults(f"kill 0.1 after 1STEP@{STEPS}")).finish()
    assert_same_training(result, reference(), {"0.1"})


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.parametrize("moment, lost", (("finishing", {"1.0"}), ("left", set())))
def test_a_death_after_the_last_step(launch, reference, moment, lost):
    """Rank 1's script is through; what the others still commit, they commit without it.

    Once it has said goodbye, nobody misses it.
    """
    result = launch(**strike_at(moment, 1)).finish()
    assert result.code == 0 and {event["seat"] for event in result.of("lost")} == lost, result.output[-6000:]
    assert len(result.of("finished")) == 1 and result.of("committed")[-1]["step"] == STEPS
    assert set(result.records) == {0, 1, 2, 3} and difference(result, reference()).tolerated


def everything(run, server) -> set[int]:
    found = {process.pid for process in processes_with(run.mark)} | server.forked()
    assert len(found) >= 10
    return found


def terminate(pids: set[int]) -> None:
    """Some end by themselves once others have got it."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.real_launcher
def test_sigterm_to_everything_while_training(launch, server):
    run = launch("steps=100000")
    after_step(run, 4)
    terminate(everything(run, server))
    result = run.finish()
    assert not result.of("lost") and len(result.of("finished")) == 1, result.output[-6000:]
    steps = [int(event["text"].split("after step ")[1].split()[0]) for event in result.of("left")]
    # on a slow machine some get it, and leave, a step before the others
    assert len(steps) == 4 and max(steps) == result.of("committed")[-1]["step"]


@pytest.mark.real_launcher
def test_sigterm_to_everything_while_initialising(launch, server, tmp_path):
    """Others wait for rank 2, in what is deaf to signals."""
    flag = tmp_path / "there"
    run = launch(**strike_at("initialize", 2, str(flag)))
    run.wait_for(flag.exists, "rank 2 in deepspeed.initialize")
    terminate(everything(run, server))
    result = run.finish()
    assert result.code != 0 and not result.of("start") and not result.records and "Traceback" not in result.output, (
        result.output[-6000:]
    )
