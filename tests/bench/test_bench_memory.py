"""scripts/bench_memory.py prints the formula beside what jobs measured, and says where they are apart."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from recycle_plugin.core.vocabulary.worker_bytes import WorkerBytes
from tests.support.loaded import loaded
from tests.support.memory import MOMENTS, Case

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_memory.py"
N = 1000


@pytest.fixture
def bench() -> ModuleType:
    return loaded(SCRIPT)


def worker(seat: str, more: int) -> dict:
    """What a worker has measured that holds ``more`` bytes than the formula says while it sums."""
    of = WorkerBytes(N, "fp32", "inverse")
    peaks = of.peaks(committed=True) | {"summing": of.peaks(committed=True)["summing"] + more}
    found = {op: peaks[moment] for moment, ops in MOMENTS.items() for op in ops}
    return {"seat": seat, "parameters": N, "largest": 0, "settled": of.settled, "between": of.between, "peaks": found}


@pytest.mark.parametrize("more, code", ((500, 0), (2000, 1)))
def test_the_worker_that_is_furthest_off_counts(bench, monkeypatch, tmp_path, capsys, more, code):
    monkeypatch.setattr(bench, "ForkServer", lambda folder, kind: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(bench, "measured", lambda server, folder, case: [worker("0.0", 0), worker("1.0", more)])
    monkeypatch.setattr(bench, "CASES", (Case(), Case(undo="inverse")))
    path = tmp_path / "out.json"
    assert bench.main(["--only", "fp32", "inverse", "--json", str(path)]) == code
    (row,) = json.loads(path.read_text())
    assert row["setting"] == "fp32, inverse" and row["parameters"] == N
    assert row["moments"]["summing"] == {"formula": 20.0, "measured": 20 + more / N}
    assert row["apart"] == pytest.approx(more / (20 * N + more))
    assert f"20.00 / {20 + more / N:5.2f}" in capsys.readouterr().out


def test_a_word_that_is_in_no_name_is_refused(bench, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--only", "fp64"])
    assert ended.value.code == 2 and "--only fp64: none of fp32, snapshot;" in capsys.readouterr().err
