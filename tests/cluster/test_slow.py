"""A worker that has become slow gets less work, and its own again when it no longer is."""

from __future__ import annotations

import json

import pytest

from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.observability.trace import read_traces
from tests.support.jobs import WRAPPED, assert_same_training

pytestmark = pytest.mark.plain_too(deepspeed=False)

FIRST, LAST = 3, 12  # steps in which it is three times as slow


def test_a_slow_worker_gets_less_work_while_it_is_slow(launch, reference):
    wrap = json.dumps({"name": "slow", "seat": "1.0", "times": 3, "steps": [FIRST, LAST]})
    result = launch("recycle.rebalance=true", "recycle.trace=true", script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert_same_training(result, reference())
    found = [(event["seat"], event["percent"]) for event in result.of("rebalance")]
    assert found[0][0] == "1.0" and found[0][1] >= 200 and ("1.0", 100) in found
    forwards = {step: [0, 0] for step in range(1, 21)}
    for span in read_traces(result.folder / "trace"):
        if span.instruction.op is Op.F and span.instruction.stage == 0:
            forwards[span.instruction.step][span.seat.replica] += 1
    print(forwards)
    assert forwards[FIRST] == [2, 2] and forwards[LAST] == [3, 1] and forwards[20] == [2, 2]
