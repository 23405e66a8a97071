"""scripts/bench_instructions.py: seconds by instruction, from a clock and steps written by hand, and in real jobs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from recycle_plugin.lab.experiments.bench_scripts import DEADLINE_S
from tests.support.loaded import loaded

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_instructions.py"
TWO = "two Linears a stage"


@pytest.fixture(scope="module")
def bench():
    return loaded(SCRIPT)


def test_an_instruction_has_the_seconds_until_the_next_begins(bench, monkeypatch):
    times = iter((0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0))
    monkeypatch.setattr(time, "thread_time", lambda: next(times))
    spent = bench.Spent()
    for kind in ("RA", "F", "VALIDATE", "STEP", "between"):
        spent.begin(kind)
    assert spent.taken() == {
        "between": 1.0 + 32.0,
        "F": 4.0,
        "STEP": 8.0 + 16.0,
        "REDUCE": 0.0,
        "moves": 2.0,
        "micro-batch": 39.0,
    }
    assert not spent.seconds


def test_medians_are_of_a_micro_batch_and_of_a_step(bench):
    steps = [{"micro-batch": 8e-6 * each, "F": 8e-6, "STEP": 3e-6} for each in (1, 5, 90)]
    assert bench.medians(steps) == pytest.approx({"micro-batch": 5.0, "F": 1.0, "STEP": 3.0})


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_real_jobs_say_what_each_instruction_takes_and_calls(bench, tmp_path):
    found = {}
    for kind in ("stock", "counted"):
        with bench.started(tmp_path / kind, kind, TWO, {}) as run:
            run.wait_for(lambda: len(bench.steps_of(run)) >= bench.STARTED, "some steps", DEADLINE_S)
            found[kind] = bench.medians(bench.steps_of(run))
            if kind == "counted":
                run.wait_for(lambda: (tmp_path / kind / "calls.json").exists(), "its calls", DEADLINE_S)
    assert found["stock"].keys() >= {"micro-batch", "F", "B", "moves", "REDUCE", "STEP"}
    calls = json.loads((tmp_path / "counted" / "calls.json").read_text())
    assert calls.keys() >= {"F", "I", "W", "REDUCE", "STEP"} and min(each[0] for each in calls.values()) > 0
