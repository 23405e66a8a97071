"""scripts/bench_log_step.py judges windows that alternate, on commits written by hand."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.lab.experiments import turns
from recycle_plugin.lab.experiments.measurements import TooShort
from recycle_plugin.runtime.log.records import DatumRecord, Part, Stream
from recycle_plugin.runtime.log.writer import LogWriter


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("bench_log_step")


def commits(began: list[float], step_s: float) -> list[float]:
    """Of steps in windows of 6 s; between two of them lies a pause, in which one step is under way."""
    return [start + number * step_s for start in began for number in range(1, int(6 / step_s))]


@pytest.mark.parametrize("with_log, broken, met", [(0.505, [], True), (0.52, [], False), (0.5, ["gap"], False)])
def test_the_verdict_is_on_the_median_of_pairs(bench, capsys, with_log, broken, met):
    off, on = [0.0, 30.0, 40.0], [10.0, 20.0, 50.0]
    windows = {
        bench.OFF: [turns.Window(at, at + 6, 3.0) for at in off],
        bench.ON: [turns.Window(at, at + 6, 6.0) for at in on],
    }
    told = {bench.OFF: commits(off, 0.5), bench.ON: commits(on, with_log)}
    found = bench.judged(windows, told, {"rank 0": 25_000_000}, broken)
    assert found["met"] == met and found["ratio"] == pytest.approx(with_log / 0.5)
    assert found["interval"] == pytest.approx([with_log / 0.5] * 2)
    assert found["mb_per_s"] == {"rank 0": pytest.approx(50)}
    assert found["cpu_s"] == {bench.OFF: pytest.approx(0.25), bench.ON: pytest.approx(with_log)}
    assert ("NOT MET" in capsys.readouterr().out) != met


def test_the_interval_has_the_median_in_it_and_is_the_same_each_time():
    values = [1.0, 1.1, 0.9, 1.05, 0.95, 1.3, 0.8]
    low, high = turns.interval(values)
    assert 0.8 <= low < 1.0 < high <= 1.3 and turns.interval(values) == (low, high)


def test_a_window_without_a_whole_step_is_refused():
    with pytest.raises(TooShort, match="--window"):
        turns.step_s(turns.Window(0.0, 6.0, 0.0), [1.0, 7.0])


def test_bytes_of_a_step_are_those_of_its_records(bench, tmp_path):
    writer = LogWriter(tmp_path, Stream("run", WorkerId(3), Seat(0, 1)), 1 << 20, print)
    for step in (1, 2):
        for number in range(step):
            datum = Datum("act", 1, MicroBatch(0, number), step)
            assert writer.keep(DatumRecord(datum, (Part("", "uint8", (1000,)),), 0), [bytes(1000)])
        writer.commit(step, 0)
    writer.close()
    found = bench.logged_bytes(tmp_path)
    assert list(found) == ["rank 3"] and 2000 < found["rank 3"] < 3000


def test_the_jobs_differ_in_the_log_alone_and_take_turns(bench, tmp_path, monkeypatch):
    """The runs are stand-ins; the first of a pair is the other one each time."""
    asked, order = [], []

    class Run:
        def __init__(self, folder, workers, overrides):
            asked.append(overrides)
            self.name, self.folder = folder.name, folder

        def __enter__(self):
            return self

        def __exit__(self, *_):
            order.append(f"end {self.name}")

        def wait_for(self, found, what, timeout_s):
            order.append(f"start {self.name}")

        def events(self):
            return [{"event": "committed", "time": number / 4} for number in range(400)]

    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(bench, "TrainingRun", Run)
    monkeypatch.setattr(turns, "pause", lambda run: None)
    monkeypatch.setattr(turns, "cpu_s", lambda run: 1.0)
    monkeypatch.setattr(turns, "go_on", lambda run: order.append(run.name))
    monkeypatch.setattr(turns.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(turns.time, "time", lambda: next(clock))
    monkeypatch.setattr(bench, "logged_bytes", lambda folder: {"rank 0": 10})
    found = bench.argparse.Namespace(part="real", pairs=2, window=6.0, out=tmp_path, folder=None, mb_per_s=50.0)
    assert bench.real(found)["ratio"] == pytest.approx(1)
    without, with_log = asked
    assert set(with_log) - set(without) == {f"recycle.log={{folder: {tmp_path.resolve()}/real-with/log}}"}
    had = [name for name in order if " " not in name]
    assert had == ["real-with", "real-without", "real-without", "real-with"]
