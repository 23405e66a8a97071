"""Evaluations between steps: the mean loss is the same, whoever dies before or in them."""

from __future__ import annotations

import json

import pytest

from tests.support.jobs import CHECKPOINT, LOSS_TOLERANCE, Shape, faults

DEEP = Shape(replicas=2, stages=3)


@pytest.fixture
def evaluate(launch):
    """``evaluate(times, lost, *faults, shape=)``: the mean losses of that many evaluations of the same state, and the
    result.
    """

    def run(times: int, lost: int, *texts: str, shape: Shape = Shape()):
        plan = json.dumps({"evaluate_at": 3, "times": times})
        result = launch(
            "steps=5",
            "recycle.trace=true",
            faults(*texts),
            shape=shape,
            script=CHECKPOINT,
            RECYCLE_TEST_CHECKPOINT=plan,
        ).finish()
        assert result.code == 0 and len(result.of("lost")) == lost, result.output[-6000:]
        (evaluated,) = {tuple(record["evaluated"]) for record in result.records.values()}
        return evaluated, result

    return run


KILLS = {
    "an end of each replica": (Shape(), "kill 0.0 before 0F0.1@-2", "kill 1.1 after 1RA1.0<1.0@-3"),
    "a middle stage": (DEEP, "kill 0.1 before 1F0.1@-2", "kill 1.2 after 2LOAD1.1@-3"),
}


@pytest.mark.plain_too
@pytest.mark.parametrize("case", KILLS)
def test_whoever_dies_the_mean_is_the_same(evaluate, case):
    """Whole, with a death in it, with another, and without both."""
    shape, *kills = KILLS[case]
    evaluated, result = evaluate(4, 2, *kills, shape=shape)
    assert evaluated == pytest.approx([evaluated[0]] * 4, abs=LOSS_TOLERANCE)
    assert not [event for event in result.of("warning") if "evaluation" in event["text"]]
    assert len(result.losses) == 5


@pytest.mark.plain_too(deepspeed=False)
def test_a_replica_without_ends_is_left_out(evaluate):
    (whole, without), result = evaluate(2, 2, "kill 0.0 before 0LOAD0.0@-2", "kill 0.1 before 1F0.0@-2")
    (warning,) = [event for event in result.of("warning") if "evaluation" in event["text"]]
    assert warning["replicas"] == [0] and without != pytest.approx(whole, abs=LOSS_TOLERANCE)
