"""scripts/bench_control.py measures the coordinator's part and a survivor's, by the number of workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_control.py"


def test_it_writes_what_each_shape_takes(tmp_path):
    arguments = ["--shapes", "2x2", "4x3", "--micro-batches", "4", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], timeout=110, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    small, large = json.loads((tmp_path / "control.json").read_text())
    assert (small["workers"], large["workers"]) == (4, 12) and small["told"] < large["told"]
    assert all(
        row[name] > 0 for row in (small, large) for name in ("start", "step", "loss", "many", "left", "idle", "served")
    )
    assert large["told_first"] > small["told_first"] > 0
    assert [line.startswith("bytes at the start: workers ** ") for line in done.stdout.splitlines()] == [
        False,
        False,
        True,
    ]
