"""What the package ships, and its command."""

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from recycle_plugin import __version__, cli
from recycle_plugin.cli import main
from recycle_plugin.versions import EXTRAS, HUGGING_FACE, RANGES

CHECKOUT = Path(__file__).parents[2]


def test_constraints_pin_every_dependency():
    pinned = (CHECKOUT / "scripts" / "constraints.txt").read_text().lower()
    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    extras = parser["options.extras_require"].values()
    wanted = [line for lines in (parser["options"]["install_requires"], *extras) for line in lines.split("\n")]
    for line in filter(None, map(str.strip, wanted)):
        name = line.split(">")[0]
        assert f"\n{name}==" in pinned, name
    assert "+" not in pinned.replace("++", "")


def test_setup_cfg_and_the_check_at_the_start_name_the_same_releases():
    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    extras = parser["options.extras_require"]
    named = sorted({*EXTRAS.values(), "huggingface"})
    lines = "\n".join((parser["options"]["install_requires"], *(extras[name] for name in named)))
    declared = {one.name: one.specifier for one in map(Requirement, filter(None, lines.split("\n")))}
    wanted = RANGES | HUGGING_FACE
    assert {name: declared[name] for name in wanted} == {name: SpecifierSet(needs) for name, needs in wanted.items()}


def test_a_command_that_needs_what_is_not_installed_says_how_to_install_it(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib.figure')")
    arguments = f"-m {cli.__name__} plan --pp 2 --dp 2 --micro-batches 4 --png plan.png"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{CHECKOUT}"}
    ended = subprocess.run(
        [sys.executable, *arguments.split()], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 2
    assert ended.stderr == "recycle: matplotlib is not installed: pip install 'recycle_plugin[report]'\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"recycle_plugin {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--nonsense"]])
def test_a_wrong_command_exits_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and capsys.readouterr().err


def test_settings_command_prints_the_table(capsys):
    assert main(["settings"]) == 0
    assert "| `split_backward` | `true` |" in capsys.readouterr().out
