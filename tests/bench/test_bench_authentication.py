"""scripts/bench_authentication.py measures start-ups with a handshake, in TLS too, and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_authentication.py"


def test_it_writes_the_times_of_each_round(tmp_path):
    """Of each kind: until all were welcomed, and of the processor."""
    arguments = ["--connections", "2", "5", "--rounds", "3", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], timeout=110, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "authentication.json").read_text())
    rates = found.pop("bytes_per_s")
    assert rates.keys() == {"with", "TLS"} and all(len(each) == 3 and min(each) > 0 for each in rates.values())
    assert found.keys() == {"2", "5"}
    for kinds in found.values():
        assert kinds.keys() == {"with", "without", "TLS"}
        for rounds in kinds.values():
            assert [len(each) for each in rounds] == [2, 2, 2] and min(map(min, rounds)) > 0
    assert done.stdout.count("times as long") == 4 and "Traceback" not in done.stderr
