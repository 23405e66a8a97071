"""Jobs in fp16 and bf16, with loss scales that overflow."""

from __future__ import annotations

import json

from tests.support.cluster import Result
from tests.support.jobs import STEPS, WRAPPED, Difference, difference
from tests.support.kills import struck


def assert_same(
    result: Result, reference: Result, tolerated: Difference, lost: set[str], kills: tuple[str, ...]
) -> None:
    assert result.code == 0 and not result.restarted, result.output[-6000:]
    assert {event["seat"] for event in result.of("lost")} == lost and struck(result) == set(kills)
    found = difference(result, reference)
    print(f"lost {', '.join(sorted(lost))}: losses differ by {found.loss:.2g}, parameters by {found.parameters:.2g}")
    assert found.loss <= tolerated.loss and found.parameters <= tolerated.parameters, found


OVERFLOW = {"name": "overflow", "at": ["1W0.1@4", "0W1.0@9"]}
SCALING = {"initial_scale_power": 8, "loss_scale_window": 4, "hysteresis": 1}


def scales(skipped: set[int]) -> list[tuple[int, float]]:
    """After which steps the scale changes, and to what: four good steps in a row double it, an overflow halves it."""
    scale, good, found = 2.0**8, 0, []
    for step in range(1, STEPS + 1):
        before = scale
        if step in skipped:
            scale, good = scale / 2, -1
        elif good and good % 4 == 0:
            scale *= 2
        good += 1
        if scale != before:
            found.append((step, scale))
    return found


HALF, AS_SCALED = {"name": "half_on_cpu"}, {"name": "unscaled_as_scaled"}
INFINITE = OVERFLOW | {"name": "overflow_in_half"}


def fp16(stage: int = 0, **section: object) -> str:
    config: dict[str, object] = {"fp16": {"enabled": True, **SCALING, **section}}
    if stage:
        config |= {"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": "fp32"}}
        config |= {"communication_data_type": "fp32", "zero_allow_untested_optimizer": True}
    return "deepspeed=" + json.dumps(config).replace('"', "")


def wrapped(*wraps: dict) -> dict[str, str]:
    return {"script": WRAPPED, "RECYCLE_TEST_WRAP": json.dumps([HALF, *wraps])}


VALIDATED = "recycle.clip=validate"


def changes(result: Result) -> dict[int, float]:
    """By the step after which it is another one: the loss scale.  Of a step that is taken back the last word counts."""
    return dict(sorted({event["step"]: event["scale"] for event in result.of("loss_scale")}.items()))
