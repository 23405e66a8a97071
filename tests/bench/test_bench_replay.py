"""scripts/bench_replay.py measures replays with and without help in real jobs, and judges them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("bench_replay")


def row(helpers: int, share_s: float, ratio: float = 1.0) -> dict:
    return {"helpers": helpers, "steps": 2, "share_s": share_s, "reduce_s": 0.1, "step_s": 0.1, "ratio": ratio}


@pytest.mark.parametrize(
    "rows, met, faster",
    [
        ([row(0, 9.0)], True, None),
        ([row(0, 9.0, 1.2)], False, None),
        ([row(1, 5.0), row(4, 1.8)], True, 2.6),
        ([row(1, 5.0), row(4, 2.0)], False, 5.2 / 2.2),
    ],
)
def test_the_verdict_is_on_both_targets(bench, rows, met, faster):
    found = bench.judged(rows)
    assert found["met"] == met and found["faster_with_4_than_1"] == (None if faster is None else pytest.approx(faster))


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_a_replay_in_a_real_job_is_measured(bench, server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RECYCLE_FORK_SERVER", server.path)
    job = ["--stages", "3", "--micro-batches", "4", "--steps", "6", "--each-ms", "5", "--helpers", "0", "2"]
    bench.main([*job, "--out", str(tmp_path / "out")])
    alone, helped = json.loads((tmp_path / "out" / "replay.json").read_text())["rows"]
    assert (alone["helpers"], helped["helpers"]) == (0, 2)
    assert alone["parameters_bytes"] == 0 < helped["parameters_bytes"] and helped["spawn_s"] > 0 < helped["load_s"]
    assert alone["bound_s"] == pytest.approx(alone["steps"] * 4 * 0.015)
    assert helped["bound_s"] == pytest.approx(helped["steps"] * 2 * 0.015)
    assert "ratio" in capsys.readouterr().out
