"""``recycle plan --refine [--exact]``: a shorter schedule of the same job, and what can't be searched for in one
line.
"""

from __future__ import annotations

import json
import sys

import pytest

from recycle_plugin.cli import main

JOB = "plan --pp 3 --dp 1 --micro-batches 3 --cap 1.34 --costs F=3,I=2/1/2,W=3,step=1"


def figures(capsys, more: str) -> dict:
    assert main([*JOB.split(), *more.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_refining_finds_the_optimum_and_says_what_it_began_with(capsys) -> None:
    pytest.importorskip("ortools")
    plain, refined = figures(capsys, ""), figures(capsys, "--refine 5 --exact")
    assert plain["period"] == plain["period_unrefined"] == refined["period_unrefined"] == 29
    assert (
        refined["period"] == 28
        and refined["digest"] != plain["digest"]
        and refined["lower_bound"] == plain["lower_bound"]
    )
    assert main([*JOB.split(), "--refine", "5", "--exact"]) == 0
    assert "refined from 29 ticks" in capsys.readouterr().out


def test_a_plan_that_meets_its_bound_is_left_alone(capsys) -> None:
    arguments = "plan --pp 4 --dp 3 --micro-batches 6 --lost 1.2 --cap 2.0 --costs F=1,I=1,W=1 --json"
    found = []
    for more in ("", " --refine 100"):
        assert main((arguments + more).split()) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["digest"] == found[1]["digest"] and found[0]["gap"] == 0


@pytest.mark.parametrize(
    "more, says",
    [
        ("--exact", "how many seconds"),
        ("--refine -1", "--refine -1"),
        ("--refine 0.01 --exact --couple", "couple"),
        ("--refine 0.01 --exact --micro-batches 100", "up to 800 operations, this job has 900"),
    ],
)
def test_what_cannot_be_searched_for_is_named(capsys, more: str, says: str) -> None:
    pytest.importorskip("ortools")
    assert main([*JOB.split(), *more.split()]) == 2
    assert says in capsys.readouterr().err


def test_a_missing_solver_is_named(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools", None)
    assert main([*JOB.split(), "--refine", "0.01", "--exact"]) == 2
    assert "recycle_plugin[exact]" in capsys.readouterr().err
