"""Imports point down only, in every file of the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "recycle_plugin"
HALVES = {"core.vocabulary", "core.messages"}
CORE = {"core", *HALVES, "core.coordinator", "core.worker"}
OBSERVES = {*CORE, "planner", "render", "errors", "folders"}
CONTROLS = {*CORE, "errors", "folders", "authentication", "runtime.system"}
MOVES = {*CONTROLS, "runtime.control", "runtime.devices", "runtime.lines"}
STAGE = {*MOVES, "runtime.state", "runtime.movers", "runtime.collectives"}
WORKER = {*STAGE, "runtime.stage", "runtime.log", "runtime.processes", "runtime.catch_up"}
RUNTIME = {*WORKER, "runtime.worker"}
BELOW = {
    "versions": set(),
    "errors": set(),
    "folders": {"errors"},
    "core": set(),
    "core.vocabulary": set(),
    "core.messages": {"core.vocabulary"},
    "core.coordinator": HALVES,
    "core.worker": HALVES,
    "planner": {"core.vocabulary"},
    "render": {"core.vocabulary", "planner"},
    "observability": OBSERVES,
    "settings": {"core.vocabulary", "core.messages", "planner", "authentication"},
    "authentication": {"errors"},
    "runtime.system": set(),
    "runtime.devices": {"core.vocabulary", "errors"},
    "runtime.state": {"core.vocabulary", "errors", "runtime.devices"},
    "runtime.lines": {"core.messages", "authentication", "runtime.system"},
    "runtime.log": {"runtime.lines", *HALVES, "core.worker", "errors", "folders", "authentication"},
    "runtime.control": CONTROLS,
    "runtime.processes": {*MOVES, "planner", "observability", "runtime.log"},
    "runtime.movers": MOVES,
    "runtime.collectives": {*MOVES, "runtime.state", "runtime.movers"},
    "runtime.catch_up": {*MOVES, "runtime.state", "runtime.movers"},
    "runtime.stage": STAGE,
    "runtime.worker": {*WORKER, "planner", "observability", "settings"},
    "adapters": {*OBSERVES, *RUNTIME, "observability", "settings", "versions"},
    "worker_process": {
        "core.messages",
        "core.vocabulary",
        "core.worker",
        "planner",
        "settings",
        *RUNTIME,
        "adapters",
        "errors",
    },
    "launch": {*RUNTIME, "settings"},
    "commands": {*OBSERVES, *RUNTIME, "observability", "settings", "adapters", "versions"},
    "cli": {"commands", "errors", "settings", "versions"},
    "docs": set(),
    "lab.planner": CORE,
    "lab.simulator": {*CORE, "planner", "lab.planner"},
    "lab.runs": {"core.vocabulary", "observability", "launch"},
    "lab.experiments": {"core.vocabulary", "observability", "lab.runs"},
    "lab": {
        *OBSERVES,
        *RUNTIME,
        "observability",
        "settings",
        "adapters",
        "lab.runs",
        "commands",
        "cli",
        "versions",
        "lab.planner",
        "lab.simulator",
        "lab.experiments",
    },
    "": {"planner", *RUNTIME},
}
"""What each part may import, beside itself; the last one is the package's own face."""
FRAMEWORKS = {"torch", "deepspeed", "megatron"}
FOREIGN = {
    "core": {*FRAMEWORKS, "numpy", "matplotlib", "rich"},
    "planner": FRAMEWORKS,
    "lab.planner": FRAMEWORKS,
    "lab.simulator": FRAMEWORKS,
    "render": FRAMEWORKS,
    "observability": FRAMEWORKS,
    "settings": FRAMEWORKS,
    "folders": FRAMEWORKS,
    "lab.experiments": FRAMEWORKS,
    "authentication": FRAMEWORKS,
    "runtime.log": FRAMEWORKS,
    "runtime": {"deepspeed", "megatron"},
}
"""Whose code each part does not import."""


def part(module: str) -> str:
    """Of ``recycle_plugin.core.worker.executor`` it is core.worker; of the package's own names it is ""."""
    names = module.split(".")[1:]
    return next((name for name in (".".join(names[:2]), ".".join(names[:1])) if name in BELOW), "")


def files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.read_text())


def module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the whole name of what is imported"
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("name", sorted({part(module(path)) for path in files()}))
def test_imports_point_down(name: str) -> None:
    for path in (path for path in files() if part(module(path)) == name):
        for imported in imports(path):
            root = imported.split(".")[0]
            if root == "recycle_plugin":
                allowed = BELOW[name] | {name, ""} | ({"core"} if name.startswith("core") else set())
                assert part(imported) in allowed, (
                    f"{path.relative_to(PACKAGE)} imports {imported}: {name} stands below {part(imported)}"
                )
            assert root not in FOREIGN.get(name, FOREIGN.get(name.split(".")[0], ())), (
                f"{path.relative_to(PACKAGE)} imports {imported}: not in {name}"
            )


def test_no_module_imports_itself_in_a_circle() -> None:
    """Types count in the core, which is to be read from the bottom up; elsewhere what is imported as it runs."""
    modules = {module(path): path for path in files()}
    arrows = {}
    for name, path in modules.items():
        unheeded = set() if part(name).startswith("core") else {known(found, modules) for found in for_types(path)}
        arrows[name] = {found for each in imports(path) if (found := known(each, modules))} - unheeded - {name}
    assert circles(arrows) == set()


def known(imported: str, modules: dict[str, Path]) -> str | None:
    return next((name for name in (imported, imported.rpartition(".")[0]) if name in modules), None)


def for_types(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from (f"{one.module}.{name.name}" for one in node.body for name in getattr(one, "names", ()))


def test_settings_travel_no_further() -> None:
    """All other modules of the runtime are given the few values that they go by."""
    read = {
        path.name for path in (PACKAGE / "runtime").rglob("*.py") if any(".settings." in it for it in imports(path))
    }
    assert read == {"parts.py", "stage_log.py", "trainer.py"}


def test_every_part_is_there_and_nothing_is_above_itself() -> None:
    assert (
        {part(module(path)) for path in files()}
        <= set(BELOW)
        <= {part(module(path)) for path in PACKAGE.rglob("*.py")} | {"docs"}
    )
    above = {name: {other for other, below in BELOW.items() if name in below} for name in BELOW}
    order: list[str] = []
    while len(order) < len(BELOW):
        free = [name for name in BELOW if name not in order and BELOW[name] <= set(order)]
        assert free, f"in a circle: {sorted(set(BELOW) - set(order))}, {above}"
        order += free


CIRCLES = {  # of folders that import each other, still to be opened; no other may come
    frozenset({"adapters.deepspeed", "adapters.deepspeed.replica"}),
}


def folder(name: str) -> str:
    """The folder of a module, or of a name in it, as a dotted name; of a module beside them all, the module."""
    at, found = PACKAGE, []
    for one in name.split(".")[1:]:
        if not (at / one).is_dir():
            return ".".join(found) or (one if (at / f"{one}.py").exists() else "")
        at, found = at / one, [*found, one]
    return ".".join(found)


def circles(arrows: dict[str, set[str]]) -> set[frozenset[str]]:
    reached = {name: set(below) for name, below in arrows.items()}
    for through in arrows:  # Warshall's closure, for thirty folders, or some hundreds of modules
        for below in reached.values():
            if through in below:
                below |= reached[through]
    both = {
        name: frozenset({name} | {other for other in below if name in reached.get(other, ())})
        for name, below in reached.items()
    }
    return {each for each in both.values() if len(each) > 1}


def test_folders_import_each_other_in_no_new_circle() -> None:
    arrows: dict[str, set[str]] = {}
    for path in files():
        here = folder(module(path))
        below = {folder(name) for name in imports(path) if name.split(".")[0] == "recycle_plugin"}
        arrows.setdefault(here, set()).update(below - {here, ""})
    assert circles(arrows) == CIRCLES


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {frozenset({"b", "c"})}


FRAMEWORKS = {"torch", "deepspeed", "megatron", "matplotlib"}
PARTS = "lab.simulator", "render.grid", "runtime.log.reader", "settings.schema", "cli", "lab.training.compose"


@pytest.mark.parametrize("name", ["recycle_plugin", *(f"recycle_plugin.{part}" for part in PARTS)])
def test_importing_needs_no_framework(name: str) -> None:
    script = f"import {name}, sys; print(sorted({FRAMEWORKS} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
