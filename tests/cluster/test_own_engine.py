"""Scripts with learning-rate schedulers and engine classes of their own: as with stock DeepSpeed, also where a step is taken back."""

from __future__ import annotations

import json

import pytest

from tests.support.jobs import LOSS_TOLERANCE, Shape, assert_one_line

SCRIPT = "tests/jobs/own_engine.py"
KILLS = ["kill 0.1 after 1STEP@7", "kill 0.0 before 0REDUCE@7"]  # as in test_kills.py: stage 1 has to take its step back


@pytest.fixture
def train(launch, tmp_path):
    """``train(**job)``: the result of tests/jobs/own_engine.py."""

    def run(**job: object):
        folder = str(tmp_path / f"run{len(runs)}")  # where the launcher's fixture expects it
        runs.append(folder)
        job = {"folder": folder, "enabled": True, "faults": [], "scheduler": "config", "engine": "", "gate": None, "batch_size": 0} | job
        return launch(shape=Shape(replicas=3), script=SCRIPT, RECYCLE_TEST_OWN=json.dumps(job)).finish()

    runs: list[str] = []
    return run


@pytest.mark.parametrize("scheduler, engine", (("config", ""), ("callback", "counting")))
def test_rates_come_back_with_a_step_that_is_taken_back(train, tmp_path, scheduler, engine):
    gate = {"folder": str(tmp_path / "gate"), "before": "0REDUCE@7", "until": "1STEP@7", "by": ["0.1", "1.1", "2.1"]}
    result = train(faults=KILLS, scheduler=scheduler, engine=engine, gate=gate)
    assert result.code == 0 and len(result.of("lost")) == 2, result.output[-6000:]
    assert {event["seat"] for event in result.of("rest") if event["undone"]} == {"1.1", "2.1"}
    stock = train(enabled=False, scheduler=scheduler)
    assert {record["engine"] for record in stock.records.values()} == {"PipelineEngine"}
    assert result.losses == pytest.approx(stock.losses, abs=LOSS_TOLERANCE)
    for rank, record in result.records.items():
        assert record["rates"] == pytest.approx(stock.records[rank]["rates"]) and len(set(record["rates"])) > 1
        if engine:
            assert record["engine"] == "Counting" and record["seen"] == record["losses"]


def test_another_batch_size_is_refused(train):
    assert_one_line(train(batch_size=18), "set_train_batch_size(18): another number of micro-batches than the 2 of the first step")


def test_an_engine_class_that_would_not_be_heard_is_refused(train):
    assert_one_line(train(engine="scheduling"), "Scheduling._exec_forward_pass overrides a part of DeepSpeed's schedule")
