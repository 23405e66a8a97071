"""The commands that the README, the documents and the help texts show do what they say."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from recycle_plugin.cli import main
from recycle_plugin.commands import plan
from recycle_plugin.lab.commands import simulate

ROOT = Path(__file__).parents[2]
TEXTS = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "recycle_plugin/docs").glob("*.md")))]


def examples() -> list[str]:
    """All without --help, and without a file that another command would have to write first."""
    shown = "\n".join([*TEXTS, plan.DESCRIPTION, simulate.DESCRIPTION]).splitlines()
    lines = [
        line.partition("  #")[0].strip() for line in shown if line.startswith(("recycle plan ", "recycle simulate "))
    ]
    return sorted({line for line in lines if "--help" not in line and "--profile" not in line})


def test_there_are_examples() -> None:
    assert {line.split()[1] for line in examples()} == {"plan", "simulate"} and len(examples()) >= 4


@pytest.mark.parametrize("line", examples())
def test_an_example_runs(capsys, tmp_path: Path, monkeypatch, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert len(capsys.readouterr().out.splitlines()) > 3
