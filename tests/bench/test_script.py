"""How the benchmarks' scripts end, and what their parts write."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from recycle_plugin.lab.experiments.bench_scripts import run_part, script
from recycle_plugin.lab.experiments.measurements import TooShort
from recycle_plugin.lab.runs import RunFailed


def raises(error: BaseException) -> Callable[[list[str]], int]:
    def main(arguments: list[str]) -> int:
        raise error

    return main


ENDINGS = {
    "met": (lambda arguments: 0, 0),
    "not met": (lambda arguments: 1, 1),
    "interrupted": (raises(KeyboardInterrupt()), 130),
    "terminated": (lambda arguments: signal.raise_signal(signal.SIGTERM), 130),
    "a run failed": (raises(RunFailed("the run did not end")), "bench_x: the run did not end"),
    "too few steps": (raises(TooShort("no two commits")), "bench_x: no two commits"),
}


@pytest.mark.parametrize("main, code", ENDINGS.values(), ids=ENDINGS)
def test_every_ending_has_its_code(monkeypatch, main: Callable[[list[str]], int], code: int | str) -> None:
    monkeypatch.setattr("sys.argv", ["scripts/bench_x.py"])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        script(main)
    assert ended.value.code == code and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("met", [True, False])
def test_a_parts_result_is_written_and_judged(tmp_path: Path, capsys, met: bool) -> None:
    found = argparse.Namespace(part="speed", out=tmp_path / "new" / "folder")
    assert run_part({"speed": lambda found: {"met": met}}, found) == int(not met)
    path = found.out / "speed.json"
    assert json.loads(path.read_text()) == {"met": met} and str(path) in capsys.readouterr().out
