"""scripts/bench_sharded.py: sharded replicas beside stock ZeRO, from figures written by hand and in real jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recycle_plugin.lab.experiments.turns import Window
from tests.support.loaded import loaded

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_sharded.py"


@pytest.fixture(scope="module")
def bench():
    return loaded(SCRIPT)


def step(at: float, **calls: float) -> dict:
    return {"time": at, "forward_s": 0.1, "backward_s": 0.2, "step_s": 0.3} | calls


def test_the_ratio_is_that_of_windows_side_by_side(bench, capsys):
    windows = {"stock": [Window(0, 10, 1), Window(40, 50, 1)], "replicas": [Window(20, 30, 1), Window(60, 70, 1)]}
    stock = [*(step(float(at)) for at in range(11)), *(step(float(at)) for at in range(40, 51, 2))]
    ours = [step(at, step_s=0.9) for at in (20.0, 23.0, 26.0, 60.0, 64.0, 68.0)]
    outside = [step(15.0, step_s=99.0)] * 9
    found = bench.judged(windows, {"stock": stock, "replicas": [*outside, *ours]}, {"stock": 2**20, "replicas": 2**21})
    assert found["ratios"] == [3.0, 2.0] and found["ratio"] == 2.5
    assert found["calls"]["replicas"] == {"forward_s": 0.1, "backward_s": 0.2, "step_s": 0.9}
    assert "2 MiB" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_both_train_in_turns(bench, tmp_path):
    small = ["--layers", "2", "--hidden", "16", "--samples", "2", "--pairs", "1", "--window", "4"]
    assert bench.main([*small, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "zero3.json").read_text())
    assert found["ratios"] == [found["ratio"]] and found["ratio"] > 0
    for kind in ("stock", "replicas"):
        assert all(seconds > 0 for seconds in found["calls"][kind].values()) and found["memory_bytes"][kind] > 0
    events = (tmp_path / "out" / "zero3-replicas" / "events.jsonl").read_text()
    assert '"replica"' in events and not (tmp_path / "out" / "zero3-stock" / "events.jsonl").exists()
