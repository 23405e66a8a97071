"""Scaled losses, which DeepSpeed's fp16 section asks for: nothing is another number, and steps that overflow are
skipped and take the scale down.
"""

from __future__ import annotations

import json

import pytest

from tests.support.half_precision import OVERFLOW, SCALING, scales
from tests.support.jobs import WRAPPED, assert_same_training, difference, faults

MORE = pytest.mark.all_kills
CLIPPED = "gradient_clipping=1.25"
SCALED = (CLIPPED, "recycle.clip=validate", "recycle.nonfinite=skip", "recycle.loss_scaling=true")


def scaled(launch, *more: str, also: tuple[dict, ...] = (), **options):
    wraps = json.dumps([{"name": "fp16_section", "section": SCALING}, *also])
    return launch(*SCALED, *more, script=WRAPPED, RECYCLE_TEST_WRAP=wraps, **options).finish()


def test_a_scaled_loss_changes_nothing_but_what_overflows(launch, reference):
    """Scales are powers of two, so every number is the same."""
    result = scaled(launch)
    assert_same_training(result, reference(CLIPPED))
    assert result.losses == reference(CLIPPED).losses and difference(result, reference(CLIPPED)).parameters == 0
    assert {(event["step"], event["scale"]) for event in result.of("loss_scale")} == set(scales(set()))


@pytest.mark.parametrize(
    "kill",
    (pytest.param(None, marks=MORE), "kill 0.1 after 1STEP@4", pytest.param("kill 1.0 before 0STEP@9", marks=MORE)),
)
def test_an_overflow_takes_the_scale_down_on_all_stages_and_what_had_the_old_one_is_void(launch, kill):
    result = scaled(launch, *([faults(kill)] if kill else []), also=(OVERFLOW,))
    waited = launch("recycle.nonfinite=skip", CLIPPED, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(OVERFLOW)).finish()
    assert_same_training(result, waited, {kill.split()[1]} if kill else set())
    final = dict(sorted((event["step"], event["scale"]) for event in result.of("loss_scale")))  # the last word counts
    assert set(scales({4, 9})) <= set(final.items()) and {4, 9} <= {event["step"] for event in result.of("rejected")}
