"""``recycle plan --refine``: a shorter schedule of the same job, and what can't be searched for in one line."""

from __future__ import annotations

import json

from recycle_plugin.cli import main

JOB = "plan --pp 3 --dp 1 --micro-batches 3 --cap 1.34 --costs F=3,I=2/1/2,W=3,step=1"


def figures(capsys, more: str) -> dict:
    assert main([*JOB.split(), *more.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_refining_finds_a_shorter_schedule_and_says_what_it_began_with(capsys) -> None:
    plain, refined = figures(capsys, ""), figures(capsys, "--refine 5")
    assert plain["period"] == plain["period_unrefined"] == refined["period_unrefined"] == 29
    assert refined["period"] == 28 and refined["digest"] != plain["digest"]
    assert refined["lower_bound"] == plain["lower_bound"]
    assert main([*JOB.split(), "--refine", "5"]) == 0
    assert "refined from 29 ticks" in capsys.readouterr().out


def test_a_plan_that_meets_its_bound_is_left_alone(capsys) -> None:
    arguments = "plan --pp 4 --dp 3 --micro-batches 6 --lost 1.2 --cap 2.0 --costs F=1,I=1,W=1 --json"
    found = []
    for more in ("", " --refine 100"):
        assert main((arguments + more).split()) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["digest"] == found[1]["digest"] and found[0]["gap"] == 0


def test_no_time_to_search_in_is_named(capsys) -> None:
    assert main([*JOB.split(), "--refine", "-1"]) == 2
    assert "--refine -1" in capsys.readouterr().err
