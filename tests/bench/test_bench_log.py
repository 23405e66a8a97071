"""scripts/bench_log.py measures the log's writer beside a bare write of the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_log.py"


def test_it_writes_both_times_and_their_ratio(tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--megabytes", "0.5", "--kilobytes", "1", "64", "--rounds", "2", "--json", str(out)]
    found = ["--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, *found], check=True, timeout=110, capture_output=True
    )
    rows = json.loads(out.read_text())
    assert [row["kilobytes"] for row in rows] == [1, 64]
    assert all(row["bare_ms"] > 0 for row in rows)
    assert [row["ratio"] for row in rows] == pytest.approx([row["log_ms"] / row["bare_ms"] for row in rows])
    assert len(done.stdout.splitlines()) == 2 + len(rows)
    assert list(tmp_path.iterdir()) == [out], "nothing is left of what was written"
