"""scripts/bench_undo.py measures both ways of undo, and says where one is refused."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_undo.py"


def test_it_writes_costs_and_errors_of_each_pair(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        [str(SCRIPT), "adamw", "amsgrad", "--parameters", "1", "--rounds", "1", "--json", str(tmp_path / "out.json")],
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not ended.value.code and "refused" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    held = {(row["optimizer"], row["undo"]): row["bytes a parameter"] for row in written["costs"]}
    assert held["adamw", "snapshot"] == pytest.approx(12, abs=0.1)
    assert held["adamw", "inverse"] == pytest.approx(4, abs=0.1)
    assert held["amsgrad", "inverse"] == "refused"
    errors = {(row["undo"], row["gradient"]): row for row in written["errors"] if row["optimizer"] == "adamw"}
    assert {
        errors["snapshot", gradient][name]
        for gradient in ("ordinary", "spike")
        for name in ("p", "m", "v", "p redone", "p with another")
    } == {0}
    assert 0 < errors["inverse", "ordinary"]["p"] < 1e-7
    assert errors["inverse", "spike"]["v"] > 1e-3 > errors["inverse", "spike"]["p redone"]
