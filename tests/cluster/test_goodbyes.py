"""The end of jobs that log: who is lost behind the last step, and who leaves a stage that nobody else holds."""

from __future__ import annotations

import json
import os
import signal

import pytest

from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import sentence
from tests.support.jobs import ALONE, BOTH, LOG, PLAIN, STEPS, WRAPPED, after_step, difference, faults, strike_at
from tests.support.launching import Launch

PLAINLY = pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)


def killed_at_its_end(launch: Launch, flag, *more: str):
    """The worker of stage 1 is killed in the last lines of its script, when all others have left."""
    run = launch(*LOG, *more, shape=ALONE, **strike_at("script's end", 1, str(flag)))
    run.wait_for(lambda: flag.exists() and flag.read_text(), "stage 1 at the end of its script")
    run.hear("left", 2)
    os.kill(int(flag.read_text()), signal.SIGKILL)
    return run.finish()


@pytest.mark.some_of(2)
@BOTH
@pytest.mark.parametrize("stage", range(3))
def test_a_stage_that_is_lost_in_the_last_step_comes_to_its_end(launch: Launch, reference, stage):
    result = launch(*LOG, faults(f"kill 0.{stage} after {stage}STEP@{STEPS}"), shape=ALONE).finish()
    assert result.code == 0 and len(result.of("replayed")) == 1, result.output[-8000:]
    assert len(result.of("finished")) == 1 and set(result.records) == {0, 1, 2}
    assert difference(result, reference(*LOG, shape=ALONE)).tolerated


@PLAINLY
def test_who_has_replayed_the_last_step_may_be_the_first_to_leave(launch: Launch, tmp_path):
    """It has trained no step itself."""
    first = {"name": "leaves_first", "seat": "0.2", "flag": str(tmp_path / "gone")}
    more = {"script": WRAPPED, "RECYCLE_TEST_WRAP": json.dumps(first)}
    result = launch(*LOG, faults(f"kill 0.2 after 2STEP@{STEPS}"), shape=ALONE, **more).finish()
    assert result.code == 0 and len(result.of("replayed")) == 1, result.output[-8000:]
    assert result.of("left")[0]["rank"] == 2 and set(result.records) == {0, 1, 2}


@BOTH
def test_a_stage_that_is_lost_when_all_others_have_left_comes_to_its_end(launch: Launch, reference, tmp_path):
    result = killed_at_its_end(launch, tmp_path / "there")
    assert result.code == 0 and len(result.of("replayed")) == len(result.of("rejoined")) == 1, result.output[-8000:]
    assert len(result.of("finished")) == 1 and not result.of("end") and set(result.records) == {0, 1, 2}
    assert difference(result, reference(*LOG, shape=ALONE)).tolerated


@PLAINLY
def test_where_it_would_need_the_others_the_job_fails_and_says_so_once(launch: Launch, tmp_path):
    result = killed_at_its_end(launch, tmp_path / "there", "++recycle.log.boundaries=[]")
    (decision,), (end,) = result.of("recovery"), result.of("end")
    assert result.code == 1 and not result.of("finished"), result.output[-8000:]
    assert decision["why"] == (
        "stage 0 would have to be replayed too (the boundary 0|1 is not logged), and its script has ended"
    )
    assert end["text"].startswith(
        f"the job ends: stage 1 has no live worker left, so its script's work after step {STEPS}, the last one, is "
        "not done. Last checkpoint: "
    )
    assert "and ended before its planned end" in sentence(RunHistory.read(result.folder))


@BOTH
def test_sigterm_to_the_only_worker_of_a_stage_ends_the_job_with_a_checkpoint_and_not_well(launch: Launch):
    run = launch("steps=100000", *LOG, shape=ALONE)
    after_step(run, 4)
    os.kill(run.pids()[1], signal.SIGTERM)
    result = run.finish()
    (finished,) = result.of("finished")
    assert result.code == TRY_AGAIN and not result.of("lost"), result.output[-8000:]
    assert f"after step {finished['step']}: stage 1 would have no worker left" in finished["text"]
    assert finished["text"].endswith(f"Last checkpoint: {result.of('checkpoint')[-1]['path']}")
    assert result.of("checkpoint")[-1]["path"].endswith(f"step{finished['step']}")
