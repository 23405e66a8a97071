"""What the package ships, and its command."""

import configparser
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from recycle_plugin import __version__
from recycle_plugin.cli import main
from recycle_plugin.versions import RANGES

CHECKOUT = Path(__file__).parents[2]


def declared() -> set[str]:
    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    return set(parser["options"]["packages"].split())


def present() -> set[str]:
    folders = {path.parent for path in (CHECKOUT / "recycle_plugin").rglob("*.py")}
    return {".".join(folder.relative_to(CHECKOUT).parts) for folder in folders}


def test_setup_cfg_names_every_package():
    assert present() <= declared()


def test_constraints_pin_every_dependency():
    pinned = (CHECKOUT / "scripts" / "constraints.txt").read_text().lower()
    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    wanted = parser["options"]["install_requires"].split("\n") + [
        line for extra in ("test", "docs", "tools") for line in parser["options.extras_require"][extra].split("\n")
    ]
    for line in filter(None, map(str.strip, wanted)):
        name = line.split(">")[0]
        assert f"\n{name}==" in pinned, name
    assert "+" not in pinned.replace("++", "")


@pytest.mark.parametrize("length, code", [(72, 0), (73, 1)])
def test_a_commit_with_a_long_subject_is_refused(tmp_path, length, code):
    message = tmp_path / "message"
    message.write_text(f"# a comment of git's\n{'é' * length}\n\n{'b' * 100}\n")
    ended = subprocess.run([CHECKOUT / "scripts" / "subject", message], capture_output=True, text=True, timeout=30)
    assert ended.returncode == code and (f"{length} characters" in ended.stderr) == bool(code)


def test_setup_cfg_and_the_check_at_the_start_name_the_same_releases():
    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    declared = {
        one.name: one.specifier for one in map(Requirement, parser["options"]["install_requires"].split("\n")[1:])
    }
    assert {name: declared[name] for name in RANGES} == {name: SpecifierSet(needs) for name, needs in RANGES.items()}


def test_the_documents_are_shipped():
    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    package = CHECKOUT / "recycle_plugin"
    shipped = {
        path for pattern in parser["options.package_data"]["recycle_plugin"].split() for path in package.glob(pattern)
    }
    assert shipped == set((package / "docs").iterdir()) and len(shipped) > 8


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
