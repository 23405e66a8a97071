"""A replica that holds the others up, of real processes: it is named with the rank that is late."""

from __future__ import annotations

import json

import pytest

from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import facts
from tests.support.jobs import WRAPPED, Shape
from tests.support.launching import Launch

SQUARE = Shape(2, 2, 2)
SLOW = "1.1"
LAG = {"name": "lag", "seat": SLOW, "seconds": 0.3, "last": 25}  # the others need a fifth of that


@pytest.mark.plain_too(deepspeed=False)
def test_a_slow_replica_is_named_with_the_rank_that_is_late(launch: Launch):
    result = launch(
        "steps=14", "recycle.unit=replica", shape=SQUARE, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(LAG)
    ).ended_well()
    (named,) = result.of("slow_replica")
    assert (named["replica"], named["seat"], named["rank"]) == (1, SLOW, result.rank_of(SLOW))
    assert named["behind_us"] > 200_000 and named["own_us"] > 200_000 and not named["over"]
    (told,) = [text for name, text in facts(RunHistory.read(result.folder)) if name == "slow"]
    assert told.startswith("replica 1: ") and told.endswith(f" ms a step, by rank {result.rank_of(SLOW)}")
    assert not result.of("leaving") and not result.of("lost")
