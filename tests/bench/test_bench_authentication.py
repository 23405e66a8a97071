"""scripts/bench_authentication.py measures start-ups with and without a handshake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_authentication.py"


def test_it_writes_both_times_of_each_round(tmp_path):
    arguments = ["--connections", "2", "5", "--rounds", "3", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], timeout=110, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "authentication.json").read_text())
    assert found.keys() == {"2", "5"}
    for times in found.values():
        assert [len(each) for each in times.values()] == [3, 3] and min(map(min, times.values())) > 0
    assert done.stdout.count("times as long") == 2 and "Traceback" not in done.stderr
