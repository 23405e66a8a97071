"""Sharded replicas on the stand-in accelerator (tests/support/standin), whose copies come about late.

Its kernels are the CPU's, so a job without a failure has the CPU's bits; one with a failure is compared with stock
DeepSpeed on the CPU, which trains the same samples (tests/cluster/test_sharded.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import ForkServer
from tests.support.jobs import assert_in_order
from tests.support.sharded import HELD, LONG, Start, ended_well, starting, trained_as_stock, weights

KILLS = {
    "in a forward": {"kills": [[2, 6, "forward"]]},
    "in a backward": {"kills": [[1, 7, "backward"]]},
    "before the exchange": {"faults": ["kill 1.0 before 0REDUCE@4"]},
    "behind the exchange": {"faults": ["kill 0.0 after 0REDUCE@4"]},
    "in stock's own step": {"kills": [[3, 4, "step"]]},
}


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Iterator[Start]:
    with starting(server, tmp_path) as start:
        yield start


@pytest.mark.some_of(2)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_without_a_failure_its_bits_are_those_of_the_cpu(start, stage):
    """At stage 3, and at stage 2 with small buckets, layers' hooks call collectives in autograd's thread there."""
    small = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 500}}
    found, expected = start(stage=stage, standin=True), start(stage=stage, config=small)
    ended_well(found)
    ended_well(expected)
    for rank, each in expected.records.items():
        assert found.records[rank]["losses"] == each["losses"]
        assert weights(found.records[rank]) == weights(each)
    assert_in_order(found)


@pytest.mark.some_of(3)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("moment", KILLS)
def test_a_replica_is_killed_and_the_other_trains_its_part(start, stage, moment):
    result = start(stage=stage, standin=True, recycle={"rejoin": "never"}, **KILLS[moment])
    ended_well(result)
    trained_as_stock(start, result, stage)
    assert_in_order(result)


@pytest.mark.some_of(1)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_replica_comes_back_shard_by_shard(start, stage):
    result = start(stage=stage, standin=True, kills=[[2, 7, "backward"]], held=[HELD], steps=LONG)
    ended_well(result)
    assert sorted(event["rank"] for event in result.of("rejoined")) == [2, 3]
    assert HELD <= result.records[2]["first"] == result.records[3]["first"] < LONG
    assert_in_order(result)
