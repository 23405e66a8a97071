"""The comparison with torchft: its figures from times written by hand, and the plugin's side in real processes.

torchft itself is not installed here.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from random import Random

import pytest

from recycle_plugin.experiments import against_torchft
from recycle_plugin.experiments.against_torchft import Return, Shape, Side, baseline, measure, put_together, table
from recycle_plugin.experiments.runs import RunFailed

SHAPE = Shape(replicas=2, micro_batches=2, step_s=0.06, megabytes=6)


def test_steps_belong_to_who_was_away_when_they_began():
    """Killed at 10.5, ready to train at 20, back at 23."""
    usual = [(float(at), at + 1.0) for at in range(10)]
    away = [(10.0, 14.0), (14.0, 15.5), (15.5, 21.0)]
    joining = [(21.0, 22.0), (22.0, 24.0)]
    found = put_together([*usual, *away, *joining, (24.0, 34.0)], 0.8, 10.5, 12.0, 20.0, 23.0)
    assert found == Return(0.8, 1.0, 12.5, 11.0, 3.0, 4.0, 5.5, 1.5, 2.0)
    alone = put_together([*usual, (10.0, 25.0)], 0.8, 10.5, 12.0, 20.0, 23.0)
    assert (alone.away_worst, alone.joining_median, alone.joining_worst) == (15.0, None, None)


def test_the_table_has_a_column_for_each_and_says_what_was_measured():
    rounds = [{"from_kill_s": 3.0, "joining_worst": None}, {"from_kill_s": 5.0, "joining_worst": None}]
    found = {name: {"median": {"from_kill_s": 4.0, "joining_worst": None}, "rounds": rounds} for name in ("a", "b")}
    lines = table(Shape(3, 2, 0.3, 48), found).splitlines()
    assert "measured: 3 replicas" in lines[1] and "emulated compute" in lines[1] and "medians of 2 rounds" in lines[1]
    assert lines[2].split() == ["a", "b"] and "torchft's 67% of it" in lines[-1]
    assert lines[3].split() == ["from_kill_s", "4.00", "[3.00,", "5.00]"] + ["4.00", "[3.00,", "5.00]"]
    assert lines[4].split() == ["joining_worst", "none", "none"]


@pytest.mark.parametrize("has", (against_torchft.VERSION, "0.1.0"))
def test_an_environment_is_made_once_and_of_another_version_it_is_refused(monkeypatch, tmp_path, has):
    """It finds all but torchft where this interpreter does."""
    ran: list[str] = []
    folder = tmp_path / "env"

    def run(command, what: str) -> str:
        ran.append(what)
        if "venv" in command:
            site(folder).mkdir(parents=True)
        elif "pip" in command:
            (folder / "bin").mkdir()
            (folder / "bin" / "torchft_lighthouse").touch()
        return f"{has} {version('torch')}\n"

    monkeypatch.setattr(against_torchft, "_run", run)
    for made in (["an environment for torchft", f"torchft {against_torchft.VERSION}"], []):
        ran.clear()
        if has == against_torchft.VERSION:
            assert against_torchft.rival_environment(folder) == str(folder / "bin" / "python")
        else:
            with pytest.raises(RunFailed, match=r"has torchft 0\.1\.0 and torch .*: remove it"):
                against_torchft.rival_environment(folder)
        assert ran == [*made, "torchft's version"]
    assert (site(folder) / "shared.pth").read_text() == f"{sysconfig.get_path('purelib')}\n"


def site(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_replica_is_lost_and_returns_beside_the_same_model_without_fault_tolerance(tmp_path):
    launch = [sys.executable, "-m", "recycle_plugin.launch", "--workers", "2"]
    command = [*launch, str(against_torchft.LOOPS / "with_recycle.py")]
    side = Side("recycle", command, sys.executable, against_torchft._recycle_contributed)
    plain_s = baseline(side, SHAPE, tmp_path / "plain")
    found = measure(side, SHAPE, tmp_path / "job", plain_s, Random(1))
    assert plain_s >= SHAPE.step_s <= found.step_s
    assert found.from_kill_s > found.from_start_s > found.from_ready_s > 0
    assert found.away_worst >= found.away_median > 1.0, "who is left computes for both"
    assert found.joining_worst >= found.joining_median
