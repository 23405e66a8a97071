"""The documents that the package ships say what is so: each compared with what it is about."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from recycle_plugin.cli import main
from recycle_plugin.commands import docs
from recycle_plugin.core.coordinator.exchange import Exchange
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.coordinator.switchboard import Switchboard
from recycle_plugin.core.messages.from_workers import NOTED
from recycle_plugin.observability.console import QUIET, STEPS, STYLES
from recycle_plugin.observability.telemetry import UNWRITTEN, WRITTEN
from recycle_plugin.settings.schema import reference

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "recycle_plugin"
FOLDER = PACKAGE / "docs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
TEXTS = {name: (FOLDER / f"{name}.md").read_text() for name in NAMES}

SAYERS = {"say", "_say", "note", "_note", "Event", "Note", "WeakPoint"}
"""What is called to tell the user something; the kind is the first text among its arguments."""
NUMBER = r"\d+(?:\.\d+)?(?:e-\d+)?"
FOLDERS = r"(?:scripts|tests|configs|core|planner|runtime|simulator|render|adapters|commands)"


# --- the command ---------------------------------------------------------------------------------------


def test_the_list_is_of_all_and_each_is_printed(capsys):
    assert main(["docs"]) == 0
    assert sorted(line.split()[0] for line in capsys.readouterr().out.splitlines()) == NAMES
    for name in NAMES:
        assert main(["docs", name]) == 0
        assert capsys.readouterr().out == TEXTS[name].rstrip() + "\n"


@pytest.mark.parametrize(
    "name, said",
    [
        ("tutorail", "did you mean tutorial?"),
        ("../settings", "did you mean settings?"),
        ("xyz", "there are tutorial, jobs,"),
    ],
)
def test_a_wrong_name_is_one_line(capsys, name, said):
    assert main(["docs", name]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_the_readme_has_the_same_list():
    rows = re.findall(r"^\| \[(\w+)\]\(recycle_plugin/docs/(\w+)\.md\)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows == [(name, name) for name in docs.documents()]


# --- their contents ------------------------------------------------------------------------------------


def test_the_settings_table_is_the_schemas():
    assert reference() in TEXTS["settings"], (
        "recycle_plugin/docs/settings.md: replace the table by what `recycle settings` prints"
    )


def kinds(source: str, sayers: Collection[str] = SAYERS) -> Iterator[str]:
    """Kinds of events that ``source`` says: as they are written, or by a constant of their name in capitals."""
    tree = ast.parse(source)
    constants = {
        target.id: value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for targets, values in [(node.targets[0], node.value)]
        for target, value in (
            zip(targets.elts, values.elts)
            if isinstance(targets, ast.Tuple) and isinstance(values, ast.Tuple)
            else [(targets, values)]
        )
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in sayers:
            place = 1 if getattr(node.func, "id", "") == "Note" else 0
            kind = node.args[place] if len(node.args) > place + 1 else None  # a text follows
            if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
                yield kind.value
            elif isinstance(kind, ast.Name) and kind.id in constants:
                yield constants[kind.id]


def said(sayers: Collection[str] = SAYERS) -> set[str]:
    paths = [path for path in PACKAGE.rglob("*.py") if "simulator" not in path.parts]
    return {kind for path in paths for kind in kinds(path.read_text(), sayers)}


def tabled() -> list[str]:
    section = TEXTS["operations"].partition("\n## Events\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_the_table_of_events_has_every_kind_and_no_other():
    assert tabled() == sorted(said())


def test_workers_note_what_the_coordinator_takes_of_them_and_nothing_else():
    assert said({"note", "_note", "Note"}) | {UNWRITTEN, WRITTEN} == NOTED.keys()


@pytest.mark.parametrize(
    "source, found",
    [
        ('out.say("lost", f"{member}", rank=1)', ["lost"]),
        ('self.send(Note(rank, "recovery_plan", "text", {}))', ["recovery_plan"]),
        ('A, B = "a", "b"\nself._say(B, "text")', ["b"]),
        ("self.say(Event(kind, text, details), now)", []),
        ('print("lost", "text")', []),
    ],
)
def test_kinds_are_found(source, found):
    assert list(kinds(source)) == found


def test_what_the_package_knows_of_kinds_and_what_a_real_log_has_is_in_the_table():
    log = {json.loads(line)["event"] for line in (ROOT / "tests/demo/with_failure.jsonl").read_text().splitlines()}
    assert len(log) > 5 and {*STYLES, *STEPS, *QUIET, *log} <= set(tabled())


def has(file: Path, test: str) -> bool:
    return re.search(rf"^(async )?def {test}\(", file.read_text(), re.MULTILINE) is not None


def test_each_test_that_guarantees_name_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TEXTS["guarantees"])
    assert len(named) > 40 and [(file, name) for file, name in named if not has(ROOT / "tests" / file, name)] == []


def test_each_promise_has_a_test():
    rows = [
        line for line in TEXTS["guarantees"].splitlines() if line.startswith("| ") and not line.startswith("| promise")
    ]
    assert [row for row in rows if ".py::test_" not in row] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_a_document_names_is_there(name):
    links = [
        target.partition("#")[0]
        for target in re.findall(r"\]\(([^)]+)\)", TEXTS[name])
        if not target.startswith("https://")
    ]
    files = re.findall(rf"`({FOLDERS}/[\w/]*\.?\w*/?)[` ]", TEXTS[name])
    files += re.findall(r"(?:scripts|tests)/[\w/.]*\w", TEXTS[name])
    missing = [file for file in files if not (ROOT / file).exists() and not (PACKAGE / file).exists()]
    assert missing == [] and [link for link in links if not (FOLDER / link).exists()] == []


def test_figures_that_guarantees_name_are_measured_ones():
    """Every number of theirs stands among the figures."""
    figures = [
        row.split("|")[3].strip()
        for row in TEXTS["guarantees"].splitlines()
        if row.startswith("| ") and not row.startswith("| promise")
    ]
    numbers = {number for figure in figures for number in re.findall(NUMBER, figure)}
    assert len(numbers) >= 12 and numbers <= set(re.findall(NUMBER, TEXTS["figures"]))


TABLES = {
    "JobState": JobState(1),
    "Switchboard": Switchboard(1, 0, "", 0.0),
    "Exchange": (exchange := Exchange(Switchboard(1, 0, "", 0.0))),
    "Mirror": exchange.mirror,
}


@pytest.mark.parametrize("owner", TABLES)
def test_guarantees_say_of_each_table_of_the_coordinator_what_a_takeover_keeps(owner):
    section = TEXTS["guarantees"].partition("\n## What a takeover keeps\n")[2].partition("\n## ")[0]
    rows = re.split(r"\n(?=\*)", section.partition(f"(`{owner}` in")[2].partition("\n\nW")[0])[1:]
    heads = [re.match(r"\* [^`]*((?:`\w+`(?:, )?)+)", row) for row in rows]
    named = [name for head in heads for name in re.findall(r"\w+", head[1])]
    assert sorted(named) == sorted(name.lstrip("_") for name in vars(TABLES[owner]))


# --- the pages -----------------------------------------------------------------------------------------


def test_sphinx_builds_them_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", str(ROOT / "scripts/sphinx")]
    done = subprocess.run([*command, str(FOLDER), str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.glob("*.html")} >= {*NAMES, "index"}
