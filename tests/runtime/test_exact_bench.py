"""scripts/bench_exact.py measures the sum of exact mode beside an all-reduce."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_exact.py"


def test_it_writes_both_times_and_their_ratio(tmp_path):
    arguments = f"--workers 2 --blocks 1 2 --millions 0.01 --rounds 2 --json {tmp_path / 'out.json'}"
    subprocess.run(
        [sys.executable, str(SCRIPT), *arguments.split()], check=True, timeout=110, stdout=subprocess.DEVNULL
    )
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(row["workers"], row["blocks"], row["length"]) for row in rows] == [(2, 1, 10_000), (2, 2, 10_000)]
    assert all(
        row["all_reduce_ms"] > 0 and row["ratio"] == row["fixed_order_ms"] / row["all_reduce_ms"] for row in rows
    )
