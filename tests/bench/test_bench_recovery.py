"""The benchmark of recovery itself: one kill in a real job under the launcher, with short steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.topology import Topology
from tests.support.loaded import loaded

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_recovery.py"


@pytest.fixture(scope="module")
def bench():
    return loaded(SCRIPT)


def test_only_seats_whose_stage_keeps_a_worker_are_killed(bench):
    shape = Topology(replicas=2, stages=2, micro_batches=4)
    assert bench.survivable(shape, set(shape.seats)) == list(shape.seats)
    assert bench.survivable(shape, set(shape.seats) - {Seat(0, 1)}) == [Seat(0, 0), Seat(1, 0)]
    assert bench.survivable(shape, {Seat(0, 0), Seat(0, 1)}) == []


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_kill_in_a_real_job_is_measured(bench, server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RECYCLE_FORK_SERVER", server.path)
    bench.main(["--topology", "2x2", "--step", "0.1", "--kills", "1", "--out", str(tmp_path / "out")])
    (result,) = json.loads((tmp_path / "out" / "recovery.json").read_text())
    (kill,) = result["kills"]
    assert kill["detection_s"] > 0 and kill["regroup_s"] > kill["plan_s"] >= 0
    assert kill["after_s"] > kill["before_s"]
    assert (kill["redone_s"] > 0) == (kill["redone_share"] > 0) and kill["redone_share"] < 0.5, (
        "half of the workers cannot have done more"
    )
    assert 0 <= kill["finished_share"] <= kill["restart_share"]
    assert kill["cost_s"] == pytest.approx(
        sum(kill[share] for share in ("detection_s", "regroup_s", "redone_s", "rest_s"))
    )
    said = capsys.readouterr().out
    assert "stall" in said and "again %  done % restart %" in said


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cause", ["leave", "sigterm"])
def test_a_planned_leave_in_a_real_job_is_measured(bench, server, tmp_path, monkeypatch, capsys, cause):
    monkeypatch.setenv("RECYCLE_FORK_SERVER", server.path)
    bench.main(["--topology", "2x2", "--step", "0.1", "--kills", "1", "--cause", cause, "--out", str(tmp_path / "out")])
    (result,) = json.loads((tmp_path / "out" / "recovery.json").read_text())
    (leave,) = result["kills"]
    assert result["cause"] == cause and leave["after_s"] > leave["before_s"]
    assert leave["extra_s"] == pytest.approx(result["most"]["extra_s"], abs=1e-3)
    assert f"1 planned leaves by {cause}" in capsys.readouterr().out
