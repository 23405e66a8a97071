"""Replicas of a stage that differ are found, by the seat where a majority says who is wrong."""

from __future__ import annotations

import json

import pytest

from tests.support.jobs import WRAPPED, Shape, assert_one_line, assert_same_training, faults

CHECKED = "recycle.check_replicas=4"
FLIP = json.dumps({"name": "flip_bit", "seat": "1.1", "step": 6})
THREE = Shape(replicas=3)

pytestmark = pytest.mark.plain_too


def test_replicas_are_the_same_to_the_bit_whoever_dies(launch, reference):
    result = launch(CHECKED, faults("kill 0.1 before 1REDUCE@5", "kill 1.0 after 0F1.0@10"), shape=THREE).finish()
    assert_same_training(result, reference(shape=THREE), {"0.1", "1.0"})


@pytest.mark.plain_too(deepspeed=False)
def test_who_differs_from_two_others_is_given_up(launch, reference):
    flip = json.dumps({**json.loads(FLIP), "stays": 9})
    result = launch(CHECKED, shape=THREE, script=WRAPPED, RECYCLE_TEST_WRAP=flip).finish()
    assert_same_training(result, reference(shape=THREE), {"1.1"})
    assert result.of("lost")[0]["how"] == "its state after step 8 is unlike that of the stage's other replicas"


@pytest.mark.plain_too(deepspeed=False)
def test_of_two_that_differ_nobody_knows_which_is_right(launch):
    result = launch(CHECKED, script=WRAPPED, RECYCLE_TEST_WRAP=FLIP).finish()
    assert_one_line(
        result,
        "the job ends: the replicas at seat 0.1 (rank 2), seat 1.1 (rank 3) differ after step 8, and no majority says "
        "which is right. No checkpoint was saved",
    )


@pytest.mark.plain_too(deepspeed=False)
def test_unchecked_a_flipped_bit_goes_unnoticed(launch, reference):
    """... so it is the check that finds it."""
    result = launch(script=WRAPPED, RECYCLE_TEST_WRAP=FLIP).finish()
    assert_same_training(result, reference())
