"""scripts/bench_all_reduce.py measures the sum of gradients beside Gloo's own, in the processes of a real job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.loaded import loaded

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_all_reduce.py"


@pytest.fixture(scope="module")
def bench():
    return loaded(SCRIPT)


def test_a_round_lasts_as_long_as_its_slowest_member(bench):
    told = [
        {"gloo": [1.0, 2.0, 9.0], "ours": [4.0, 4.0, 4.0]},
        {"gloo": [3.0, 1.0, 1.0], "ours": [1.0, 5.0, 6.0]},
    ]
    found = bench.row(2, 16, told)
    assert (found["gloo"], found["ours"]) == (3000.0, 5000.0) and found["ratio"] == 5 / 3


def test_where_ours_is_slower_the_table_says_for_what(bench):
    row = {"members": 2, "mib": 1.0, "gloo": 1.0, "ours": 1.2, "second buffer": 1.4, "in sums": 0.9, "around": 0.3}
    assert "in sums 0.90 ms, around 0.30 ms" in bench.shown(row | {"ratio": 1.2})
    assert "around" not in bench.shown(row | {"ratio": 1.1})


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_both_are_measured_in_a_job(bench, tmp_path, capsys):
    bench.main(["--members", "2", "--mib", "0.01", "20", "--rounds", "2", "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "all_reduce.json").read_text())
    assert [(row["members"], row["mib"]) for row in found["rows"]] == [(2, 0.01), (2, 20)]
    for row in found["rows"]:
        assert row["ours"] > row["in sums"] > 0 and row["ratio"] == row["ours"] / row["gloo"]
    ratios = [row["ratio"] for row in found["rows"]]
    assert found["met"] == (sum(ratios) / 2 <= 1.1 and max(ratios) <= 1.5)
    assert "largest" in capsys.readouterr().out
