"""What the demo reports, against values worked out by hand from with_failure.jsonl."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.lab.commands import demo
from recycle_plugin.lab.runs import RunFailed, RunOutcome
from recycle_plugin.observability.report import panels
from recycle_plugin.observability.run_history import RunHistory
from tests.support.run_folder import FAILED, FAULT_FREE, LOSSES, STEPS, outcome, spans


def test_what_the_failure_cost():
    (failure,) = demo.failures(FAILED)
    assert demo.as_report(failure) == {
        "seat": "0.1",
        "instruction": "1F0.1@6",
        "when": "before",
        "pid": 1002,
        "step": 6,
        "detection_s": 0.05,
        "regroup_s": 0.05,
        "rest_s": 0.3,
        "stall_s": 0.4,
    }


def test_a_commit_that_was_on_its_way_does_not_end_the_stall():
    """Step 5 is committed 10 ms after the kill; the stall ends with the step that the survivors commit."""
    assert FAILED.commits[5] > 102.75 and demo.failures(FAILED)[0].committed_at == FAILED.commits[6]


def test_the_report():
    found = demo.report(FAULT_FREE, FAILED, STEPS)
    assert found["passed"] and found["problems"] == []
    assert found["topology"] == {"replicas": 2, "stages": 2, "micro_batches": 4} and found["steps"] == STEPS
    assert (found["stall_s"], found["detection_s"], found["regroup_s"], found["rest_s"]) == (0.4, 0.05, 0.05, 0.3)
    assert found["step_s_before"] == 0.23  # steps 4 and 5: 0.2 and 0.26; warm-up and step 6 are left out
    assert found["step_s_after"] == 0.4  # steps 7 to 9: 0.3, 0.5, 0.4
    assert found["ratio"] == 1.739
    assert found["max_loss_difference"] == 0 and found["survivors_restarted"] == 0
    assert [one["seat"] for one in found["survivors"]] == ["0.0", "1.0", "1.1"]
    assert json.loads(json.dumps(found)) == found


WRONG = {
    "differ": (
        outcome(2, losses={rank: [*LOSSES[:-1], LOSSES[-1] + 6e-6] for rank in (0, 1, 3)}),
        "the losses differ by 6.0e-06",
    ),
    "not a number": (
        outcome(2, losses={rank: [*LOSSES[:-1], math.nan] for rank in (0, 1, 3)}),
        "the losses differ by nan",
    ),
    "too short": (
        outcome(2, losses=dict.fromkeys((0, 1, 3), LOSSES[:-1])),
        "the run with_failure has not 9 losses",
    ),
    "disagree": (outcome(2, losses={1: [0.0] * STEPS}), "the survivors do not agree"),
    "restarted": (outcome(2, pids={3: 2003}), "the worker of seat 1.1 was restarted: process 1003 became 2003"),
    "gone": (outcome(1, 2), "the worker of seat 1.0 (process 1001) did not get to the end"),
}


@pytest.mark.parametrize("failed, problem", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(failed: RunOutcome, problem: str):
    found = demo.report(FAULT_FREE, failed, STEPS)
    assert not found["passed"] and problem in "; ".join(found["problems"])
    assert found["survivors_restarted"] == (1 if "restarted" in problem else 0)


def test_a_run_without_its_failure_is_no_demo():
    unstruck = replace(FAILED, events=tuple(event for event in FAILED.events if event["event"] != "fault"))
    with pytest.raises(RunFailed, match="no fault struck"):
        demo.report(FAULT_FREE, unstruck, STEPS)
    stuck = replace(FAILED, events=tuple(event for event in FAILED.events if event["time"] < 102.84))
    with pytest.raises(RunFailed, match="no step was committed after it"):
        demo.failures(stuck)


def test_the_picture_shows_consecutive_windows():
    (failure,) = demo.failures(FAILED)
    lost, again = (
        Span(seat, Instruction.parse("1F0.0@6"), at, at + 10_000)
        for seat, at in ((Seat(0, 1), 102_740_000), (Seat(1, 1), 102_900_000))
    )
    before, interrupted, after = panels([*spans(), lost, again], failure)
    assert [panel.title for panel in (before, interrupted, after)] == [
        "steps 4 and 5",
        "step 6, interrupted",
        "steps 7 and 8",
    ]
    assert {span.instruction.step for span in before.spans} == {4, 5} and not before.deaths
    assert interrupted.deaths == {Seat(0, 1): 102_750_000}
    assert interrupted.pauses[0].text == "100 ms to notice and regroup"
    assert interrupted.again == {lost: again} and not before.again and not after.again
    assert max(span.end_us for span in before.spans) <= min(span.start_us for span in interrupted.spans)


def test_files_and_summary(tmp_path):
    found = demo.report(FAULT_FREE, FAILED, STEPS) | {"seconds": 1.0}
    demo.write(tmp_path, found, spans(), demo.failures(FAILED))
    assert json.loads((tmp_path / "report.json").read_text()) == found
    assert (tmp_path / "gantt.png").read_bytes().startswith(b"\x89PNG")
    text = demo.summary(found, tmp_path)
    for part in (
        "<-- killed",
        "stall     0.400 s",
        "0.230 s before, 0.400 s after",
        "1.1 is process 1003; 0 restarted",
        str(tmp_path),
    ):
        assert part in text


@pytest.mark.parametrize("scenario, steps, message", [("flood", 30, "there is worker"), ("worker", 9, "at least 10")])
def test_wrong_arguments_are_refused_before_anything_starts(tmp_path, scenario, steps, message):
    with pytest.raises(ValueError, match=message):
        demo.run(str(tmp_path / "out"), scenario, steps)
    assert not (tmp_path / "out").exists()


def test_samples_per_second_where_the_batch_size_has_changed():
    """Steps 1 to 6 of 8 samples in 0.1 s, then of 24 in 0.2 s; those before the change don't count for the time of a
    step.
    """
    job = {
        "event": "start",
        "time": 0.0,
        "job": {"batch": 8, "replicas": 2, "stages": 2, "micro_batches": 2},
        "seats": {},
    }
    commits = [
        {"event": "committed", "time": 0.1 * min(step, 6) + 0.2 * max(0, step - 6), "step": step}
        for step in range(1, 13)
    ]
    resized = {"event": "batch", "time": 0.6, "step": 7, "batch": 24, "micro_batches": 6}
    history = RunHistory((job, *commits, resized))
    assert history.rate(0.1, 6) == pytest.approx(80) and history.rate(history.now_s, history.last) == pytest.approx(120)
    assert history.before_s == pytest.approx(0.2) and history.shape.micro_batches == 6
