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
    "simulator": {*CORE, "planner"},
    "render": {"core.vocabulary", "planner"},
    "observability": OBSERVES,
    "settings": {"core.vocabulary", "core.messages", "planner", "simulator", "runtime.authentication"},
    "runtime.authentication": {"errors"},
    "runtime.log": {*HALVES, "core.worker", "errors", "folders", "runtime.authentication"},
    "runtime": {*OBSERVES, "observability", "settings", "runtime.authentication", "runtime.log"},
    "adapters": {*OBSERVES, "observability", "settings", "runtime", "versions"},
    "experiments": {"core.vocabulary", "observability"},
    "worker_process": {
        "core.messages",
        "core.vocabulary",
        "core.worker",
        "planner",
        "settings",
        "runtime",
        "adapters",
        "errors",
    },
    "launch": {"runtime", "runtime.authentication", "settings", "experiments"},
    "commands": {
        *OBSERVES,
        "observability",
        "settings",
        "simulator",
        "runtime",
        "runtime.authentication",
        "runtime.log",
        "adapters",
        "experiments",
        "versions",
    },
    "checks": {
        "core.vocabulary",
        "observability",
        "runtime",
        "adapters",
        "experiments",
        "commands",
        "settings",
        "cli",
        "versions",
    },
    "cli": {"commands", "errors", "settings"},
    "docs": set(),
    "": {"planner", "runtime"},
}
"""What each part may import, beside itself; the last one is the package's own face."""
FRAMEWORKS = {"torch", "deepspeed", "megatron"}
FOREIGN = {
    "core": {*FRAMEWORKS, "numpy", "matplotlib", "rich"},
    "planner": FRAMEWORKS,
    "simulator": FRAMEWORKS,
    "render": FRAMEWORKS,
    "observability": FRAMEWORKS,
    "settings": FRAMEWORKS,
    "folders": FRAMEWORKS,
    "experiments": FRAMEWORKS,
    "runtime.authentication": FRAMEWORKS,
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


@pytest.mark.parametrize("layer", ["", ".planner", ".simulator", ".render.grid", ".runtime.log.reader"])
def test_importing_needs_no_framework(layer: str) -> None:
    script = (
        f"import recycle_plugin{layer}, sys; print(sorted({{'torch', 'deepspeed', 'matplotlib'}} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
