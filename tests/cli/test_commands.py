"""The subcommands together: what each imports, that it is found by its name, its exit codes and lines of progress."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from recycle_plugin import cli
from recycle_plugin.commands import doctor, plan, progress
from tests.support.run_folder import LOG

CHECKOUT = Path(__file__).parents[2]
HEAVY = ("torch", "numba", "numpy", "deepspeed", "matplotlib", "pydantic")
COMMANDS = {**cli.COMMANDS, **cli.of_the_lab()}


@pytest.mark.parametrize("word", COMMANDS)
def test_a_command_is_in_the_module_that_is_imported_for_it(word, capsys):
    for arguments in ([word, "--help"], ["--help"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
        usage, _, rest = capsys.readouterr().out.partition("\n")
        assert word in (usage if arguments[0] == word else rest)


def test_a_look_at_a_run_imports_neither_torch_nor_numba(tmp_path):
    (tmp_path / "events.jsonl").write_text(LOG.read_text())
    script = f"""
import json, sys
from recycle_plugin.cli import main
found = {{}}
for words in {LIGHT!r}:
    main([*words, {str(tmp_path)!r}] if words[0] != "docs" else words)
    found[words[0]] = sorted({{*{HEAVY!r}}} & {{*sys.modules}})
print(json.dumps(found), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=CHECKOUT, timeout=100)
    assert done.returncode == 0 and json.loads(done.stderr.splitlines()[-1]) == {words[0]: [] for words in LIGHT}


LIGHT = (["docs", "tutorial"], ["status"], ["top"], ["clean"], ["leave", "1.1", "--run"])


# --- exit codes ----------------------------------------------------------------------------------------

BAD = {
    "demo": "--scenario nothing",
    "doctor": "nothing.json --pp 2 --dp 2",
    "plan": "--pp 2",
    "status": "nowhere",
    "top": "nowhere",
    "leave": "1.1 --run nowhere",
    "drain": "node7 --run nowhere",
    "admit": "1.1 --run nowhere",
    "report": "nowhere",
    "clean": "nowhere",
    "docs": "nothing",
    "settings": "nothing",
    "simulate": "--pp 2 --dp 2 --micro-batches 2 --mtbf soon",
    "campaign": "--seeds 0",
}


def test_each_command_has_a_bad_input_here():
    assert BAD.keys() == COMMANDS.keys()


@pytest.mark.parametrize("word", BAD)
def test_bad_input_is_two_and_a_line(word, capsys):
    try:
        code = cli.main([word, *BAD[word].split()])
    except SystemExit as ended:  # argparse's own way
        code = ended.code
    said = capsys.readouterr()
    assert code == 2 and said.out == "" and said.err.splitlines()[-1].startswith("recycle")


def test_ctrl_c_is_130_without_a_traceback(monkeypatch, capsys):
    def interrupted(name: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("recycle_plugin.commands.docs.document", interrupted)
    assert cli.main(["docs", "tutorial"]) == 130 and capsys.readouterr() == ("", "")


# --- progress ------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A terminal to which something has been written once ``told`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.told = threading.Event()
        monkeypatch.setattr(progress, "EVERY_S", 0.01)
        monkeypatch.setattr(sys, "stderr", self)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.told.set()
        return super().write(text)

    def after(self, work: Callable) -> Callable:
        """``work``, which takes until something is told."""

        def done(*given: object) -> object:
            assert self.told.wait(60), "no line of progress within 60 s"
            return work(*given)

        return done


def test_long_planning_is_told_of(monkeypatch, capsys):
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(plan, "timed", terminal.after(plan.timed))
    assert cli.main(["plan", "--pp", "2", "--dp", "2", "--micro-batches", "4"]) == 0
    lines = terminal.getvalue().splitlines()
    wanted = r"2 stages, 2 replicas, 4 micro-batches of each are planned: \d+ s so far"
    assert re.fullmatch(wanted + re.escape(progress.FIRST), lines[0])
    assert all(re.fullmatch(wanted, line) for line in lines[1:])
    assert "recycle: progress" not in {thread.name for thread in threading.enumerate()}


def test_a_long_doctor_is_told_of(monkeypatch, tmp_path, capsys):
    terminal = Terminal(monkeypatch)
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "recycle": {"enabled": True}}))
    monkeypatch.setattr(doctor, "memory", terminal.after(doctor.memory))
    assert cli.main(["doctor", str(tmp_path / "ds.json"), "--pp", "2", "--dp", "2"]) in (0, 1)
    lines = terminal.getvalue().splitlines()
    assert lines and re.match(r"\d+ plans are made for 4 workers: \d+ s so far", lines[-1])


def test_nothing_is_told_where_nobody_sits_before_it(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    with progress.told(lambda: "it goes on"):
        assert "recycle: progress" not in {thread.name for thread in threading.enumerate()}
    assert capsys.readouterr().err == ""
