"""Scripts with learning-rate schedulers and engine classes of their own: as with stock DeepSpeed, also where a step is
taken back.
"""

from __future__ import annotations

import json

import pytest

from tests.support.jobs import LOSS_TOLERANCE, Shape, assert_one_line

SCRIPT = "tests/jobs/own_engine.py"
# as in test_kills.py: stage 1 has to take its step back
KILLS = ["kill 0.1 after 1STEP@7", "kill 0.0 before 0REDUCE@7"]


@pytest.fixture
def train(launch, tmp_path):
    """``train(**job)``: the result of tests/jobs/own_engine.py."""

    def run(**job: object):
        folder = str(tmp_path / f"run{len(runs)}")  # where the launcher's fixture expects it
        runs.append(folder)
        job = {
            "folder": folder,
            "enabled": True,
            "faults": [],
            "scheduler": "config",
            "engine": "",
            "gate": None,
            "batch_sizes": {},
            "settings": {},
        } | job
        return launch(shape=Shape(replicas=3), script=SCRIPT, RECYCLE_TEST_OWN=json.dumps(job)).finish()

    runs: list[str] = []
    return run


@pytest.mark.parametrize(
    "scheduler, engine", (pytest.param("config", "", marks=pytest.mark.all_kills), ("callback", "counting"))
)
def test_rates_come_back_with_a_step_that_is_taken_back(train, tmp_path, scheduler, engine):
    gate = {"folder": str(tmp_path / "gate"), "before": "0REDUCE@7", "until": "1STEP@7", "by": ["0.1", "1.1", "2.1"]}
    result = train(faults=KILLS, scheduler=scheduler, engine=engine, gate=gate)
    assert result.code == 0 and len(result.of("lost")) == 2, result.output[-6000:]
    assert {event["seat"] for event in result.of("recovery_plan") if event["undone"]} == {"1.1", "2.1"}
    stock = train(enabled=False, scheduler=scheduler)
    assert {record["engine"] for record in stock.records.values()} == {"PipelineEngine"}
    assert result.losses == pytest.approx(stock.losses, abs=LOSS_TOLERANCE)
    for rank, record in result.records.items():
        assert record["rates"] == pytest.approx(stock.records[rank]["rates"]) and len(set(record["rates"])) > 1
        if engine:
            assert record["engine"] == "Counting" and record["seen"] == record["losses"]


SIZES = {"3": 12, "6": 3}  # four micro-batches of each replica from step 4 on, one from step 7 on
EXACT = {"exact": True}


@pytest.mark.all_kills
@pytest.mark.parametrize(
    "faults, settings",
    [
        (["kill 1.0 at resize", "kill 0.1 before 1W0.3@5"], {}),
        *(
            pytest.param(*case, marks=pytest.mark.all_kills)
            for case in (
                ([], {}),
                (["kill 0.1 before 1W0.3@5"], {}),
                (["kill 0.0 at step.end@3"], {}),
                (["kill 2.1 at resize:2"], {}),
                (["kill 0.0 at resize", "kill 1.1 at recovery.start:3"], {}),
                (["kill 0.0 before 0REDUCE@7"], {"rebalance": True}),
                (["kill 0.1 before 1W0.3@5"], EXACT),
            )
        ),
    ],
    ids=str,
)
def test_another_batch_size_between_steps(train, faults, settings):
    """As with stock DeepSpeed, whose loader goes on where it stands."""
    stock = train(enabled=False, batch_sizes=SIZES)
    result = train(batch_sizes=SIZES, faults=faults, settings=settings)
    assert result.code == 0 and len(result.of("lost")) == len(faults), result.output[-6000:]
    assert [(event["step"], event["batch"], event["micro_batches"]) for event in result.of("batch")] == [
        (4, 12, 4),
        (7, 3, 1),
    ]
    assert result.losses == pytest.approx(stock.losses, abs=LOSS_TOLERANCE)
    if settings == EXACT:
        assert result.losses == train(batch_sizes=SIZES, settings=settings).losses


@pytest.mark.all_kills
def test_batch_sizes_that_will_not_do(train):
    result = train(batch_sizes={"3": 13})
    assert result.code != 0 and "Train batch size must be divisible by micro-batch data parallelism" in result.output
    assert_one_line(
        train(batch_sizes={"3": 12, "more on rank 0": 3}),
        "set_train_batch_size() was called with 12, 15: call it with the same number on every worker",
    )


def test_an_engine_class_that_would_not_be_heard_is_refused(train):
    assert_one_line(
        train(engine="scheduling"), "Scheduling._exec_forward_pass overrides a part of DeepSpeed's schedule"
    )
