"""A replica that holds the others up, of real processes: it is named with the rank that is late, is taken offline where
the others are faster without it, and comes back.
"""

from __future__ import annotations

import json

import pytest

from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import facts
from tests.support.jobs import WRAPPED, Shape, difference, held
from tests.support.launching import Launch

SQUARE = Shape(2, 2, 2)
SLOW, STEPS = "1.1", 90
LAG = {"name": "lag", "seat": SLOW, "seconds": 0.3, "last": 25}  # the others need a fifth of that
HELD = 50  # where the others wait for those that were taken offline, longer ago than 20 steps


@pytest.mark.plain_too(deepspeed=False)
def test_a_slow_replica_is_taken_offline_and_comes_back(launch: Launch, reference, tmp_path):
    wrap = json.dumps([LAG, held(tmp_path, HELD, "go")])
    run = launch(
        f"steps={STEPS}",
        "recycle.unit=replica",
        "recycle.slow=drop",
        shape=SQUARE,
        script=WRAPPED,
        RECYCLE_TEST_WRAP=wrap,
    )
    run.wait_for(
        lambda: {event["seat"] for event in run.of("newcomer")} == {"1.0", "1.1"},
        "newcomers",
    )
    (tmp_path / "go").touch()
    result = run.ended_well()
    named, dropped = result.of("slow_replica")[0], result.of("replica_dropped")
    assert (named["replica"], named["seat"], named["rank"]) == (1, SLOW, result.rank_of(SLOW))
    assert named["behind_us"] > 200_000 and named["own_us"] > 200_000 and not named["over"]
    assert [(event["replica"], event["times"]) for event in dropped] == [(1, 1)]
    assert dropped[0]["without_us"] < dropped[0]["step_us"] / 1.1 and dropped[0]["due"] > 20
    assert {event["rank"] for event in result.of("leaving")} == {result.rank_of("1.0"), result.rank_of("1.1")}
    assert {event["seat"] for event in result.of("rejoined")} == {"1.0", "1.1"} and not result.of("lost")
    assert result.of("replica_admitted") and len(result.records) == SQUARE.ranks
    assert difference(result, reference(f"steps={STEPS}", shape=SQUARE)).tolerated


@pytest.mark.plain_too(deepspeed=False)
def test_a_slow_replica_is_only_named_by_default_and_not_at_all_if_nobody_looks(launch: Launch):
    wrap = json.dumps(LAG)
    found = [
        launch("steps=14", "recycle.unit=replica", *more, shape=SQUARE, script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
        for more in ((), ("recycle.slow=null",))
    ]
    assert [result.code for result in found] == [0, 0]
    assert [(event["replica"], event["seat"]) for event in found[0].of("slow_replica")] == [(1, SLOW)]
    (told,) = [text for name, text in facts(RunHistory.read(found[0].folder)) if name == "slow"]
    assert told.startswith("replica 1: ") and told.endswith(f" ms a step, by rank {found[0].rank_of(SLOW)}")
    assert not found[1].of("slow_replica")
    assert not any(result.of("replica_dropped") or result.of("leaving") for result in found)
