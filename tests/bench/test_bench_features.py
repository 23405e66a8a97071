"""scripts/bench_features.py judges windows that alternate, on commits written by hand."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from recycle_plugin.lab.experiments import turns
from recycle_plugin.lab.experiments.measurements import TooShort


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("bench_features")


def commits(began: list[float], step_s: float) -> list[float]:
    """Of steps in windows of 6 s; between two of them lies a pause, in which one step is under way."""
    return [start + number * step_s for start in began for number in range(1, int(6 / step_s))]


@pytest.mark.parametrize("with_all, broken, met", [(0.505, [], True), (0.52, [], False), (0.5, ["gap"], False)])
def test_the_verdict_is_on_the_median_of_processor_times(bench, capsys, with_all, broken, met):
    off, on = [0.0, 30.0, 40.0], [10.0, 20.0, 50.0]
    windows = {
        bench.OFF: [turns.Window(at, at + 6, 3.0) for at in off],
        bench.ALL: [turns.Window(at, at + 6, 3.0) for at in on],
    }
    told = {bench.OFF: commits(off, 0.5), bench.ALL: commits(on, with_all)}
    found = bench.judged(windows, told, broken)
    assert found["met"] == met and found["ratios"][bench.ALL] == pytest.approx([with_all / 0.5] * 3)
    assert found["cpu_s"][bench.OFF] == pytest.approx([0.25] * 3)
    assert ("NOT MET" in capsys.readouterr().out) != met


def test_the_interval_has_the_median_in_it_and_is_the_same_each_time():
    values = [1.0, 1.1, 0.9, 1.05, 0.95, 1.3, 0.8]
    low, high = turns.interval(values)
    assert 0.8 <= low < 1.0 < high <= 1.3 and turns.interval(values) == (low, high)


def test_a_window_without_a_whole_step_is_refused():
    with pytest.raises(TooShort, match="--window"):
        turns.step_s(turns.Window(0.0, 6.0, 0.0), [1.0, 7.0])


def test_the_jobs_differ_in_the_features_alone_and_take_turns(bench, tmp_path, monkeypatch):
    """The runs are stand-ins; the order of the jobs is another one each time."""
    asked, order = {}, []

    class Run:
        def __init__(self, folder, workers, overrides):
            asked[folder.name] = set(overrides)
            self.name, self.folder = folder.name, folder

        def __enter__(self):
            return self

        def __exit__(self, *_):
            order.append(f"end {self.name}")

        def wait_for(self, found, what, timeout_s):
            order.append(f"start {self.name}")

        def events(self):
            return [{"event": "committed", "time": number / 4} for number in range(4000)]

    clock, used = iter(range(0, 1000, 6)), iter(range(1000))
    monkeypatch.setattr(bench, "TrainingRun", Run)
    monkeypatch.setattr(turns, "pause", lambda run: None)
    monkeypatch.setattr(turns, "go_on", lambda run: order.append(run.name))
    monkeypatch.setattr(turns.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(turns.time, "time", lambda: next(clock))
    monkeypatch.setattr(turns, "cpu_s", lambda run: next(used))
    assert bench.main(["--pairs", "2", "--out", str(tmp_path)]) == 0
    none = asked.pop(bench.OFF)
    assert asked["undo"] - none == {"recycle.undo=snapshot"} and none - asked["undo"] == {bench.WITHOUT}
    assert asked["log"] - asked["checkpoint"] == {f"recycle.log={{folder: {tmp_path.resolve()}/log/log}}"}
    assert asked["hashes"] - asked["undo"] == {"recycle.check_replicas=10"}
    settings = lambda kind: {each.partition("=")[0] for each in asked[kind]}
    assert settings(bench.ALL) == set().union(*map(settings, asked))
    had = [name for name in order if " " not in name]
    assert had[: len(had) // 2] == had[len(had) // 2 :][::-1] and len(set(had)) == len(asked) + 1
