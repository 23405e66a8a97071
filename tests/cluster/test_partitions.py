"""Broken networks: whoever does not hear the coordinator stops, and the coordinator stops where it hears too few."""

from __future__ import annotations

import json
import signal

import psutil
import pytest

from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.observability.trace import read_traces
from tests.support.jobs import (
    LOSS_TOLERANCE,
    PARAMETER_TOLERANCE,
    WRAPPED,
    Shape,
    after_step,
    assert_one_line,
    assert_same_training,
    difference,
)

SOON = ("recycle.heartbeat_timeout_s=2",)
UNHEARD = "has heard nothing from the coordinator for 16 s"


def gone(processes: list[psutil.Process]) -> bool:
    """Whether those that the test has stopped have ended; the last of them may still be at it when the launcher
    goes.
    """
    return not psutil.wait_procs(processes, timeout=30)[1]


def of_guard(run, rank: int, name: str) -> psutil.Process:
    (guard,) = [
        process
        for process in psutil.Process(run.launcher.pid).children()
        if f"--local_rank={rank}" in process.cmdline()
    ]
    (found,) = [process for process in guard.children() if process.name() == name]
    return found


@pytest.mark.plain_too
def test_one_that_is_cut_off_stops_and_the_others_go_on(launch, reference):
    """What was trained is the same; the losses that it could not tell any more are missing in that step's."""
    wrap = json.dumps({"name": "cut_line", "seat": "0.1", "step": 7})
    result = launch(*SOON, "recycle.rejoin=never", script=WRAPPED, RECYCLE_TEST_WRAP=wrap).ended_well()
    assert [event["seat"] for event in result.of("lost")] == ["0.1"] and set(result.records) == {0, 1, 3}
    assert difference(result, reference()).parameters <= PARAMETER_TOLERANCE
    apart = [
        step
        for step, (loss, other) in enumerate(zip(result.losses, reference().losses), 1)
        if abs(loss - other) > LOSS_TOLERANCE
    ]
    assert apart == [event["step"] for event in result.of("warning") if "loss of step" in event["text"]] == [7]
    (line,) = [line for line in result.output.splitlines() if UNHEARD in line]
    assert "seat 0.1 (rank 2) has" in line


@pytest.mark.plain_too(deepspeed=False)
def test_a_sum_whose_connections_break_is_tried_again_over_new_ones(launch, reference):
    """... twice, and nobody is lost."""
    wrap = json.dumps({"name": "break_sum", "seat": "1.0", "step": 7, "times": 2})
    result = launch(script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert_same_training(result, reference())
    said = [event["text"] for event in result.of("warning") if "could not finish" in event["text"]]
    assert len(said) == 2 and all("all_reduce among ranks 0, 1" in text for text in said)


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.real_launcher
def test_without_the_coordinator_nobody_commits_and_all_stop(launch):
    """Its process is stopped, as if its host were cut off from all others."""
    run = launch("steps=100000", "recycle.trace=true", *SOON)
    after_step(run, 4)
    stopped = of_guard(run, 0, "recycle-host")
    stopped.send_signal(signal.SIGSTOP)
    run.wait_for(lambda: run.output.count(UNHEARD) == 4, "line of each worker")
    stopped.kill()  # or the launcher would wait for it
    result = run.finish()
    assert result.code != 0 and not result.records and "Traceback" not in result.output
    assert result.output.count(UNHEARD) == 4
    committed = result.of("committed")[-1]["step"]
    stepped = [span.instruction.step for span in read_traces(result.folder / "trace") if span.instruction.op is Op.STEP]
    assert max(stepped) <= committed + 2  # one that it had committed and not yet said so, and the one after


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.real_launcher
def test_the_coordinator_stops_where_most_are_silent(launch):
    """Three of four hosts send nothing any more, and nobody knows whether they are dead."""
    run = launch("steps=100000", *SOON, shape=Shape(4, 1, 2))
    after_step(run, 4)
    stopped = [
        process
        for rank in (1, 2, 3)
        for process in (of_guard(run, rank, "recycle-super"), psutil.Process(run.pids()[rank]))
    ]
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    run.hear("end")
    for process in stopped:  # or the launcher would wait for each
        process.send_signal(signal.SIGCONT)
    result = run.finish()
    assert gone(stopped)
    assert_one_line(
        result, "the job ends: 3 workers can't be reached and aren't known to be dead, and only 1 are left here"
    )
    lost = result.of("lost")
    assert len(result.of("end")) == 1 and len(lost) == 3
    assert not [event for event in result.of("committed") if event["time"] > lost[-1]["time"]]
