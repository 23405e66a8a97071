"""Imports point down only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

PACKAGE = Path(__file__).parents[2] / "recycle_plugin"
BELOW = {
    "core": set(),
    "planner": {"core"},
    "simulator": {"core", "planner"},
    "render": {"core", "planner"},
    "runtime": {"core", "planner"},
    "adapters": {"core", "planner", "runtime", "render"},
}
FOREIGN = {
    "core": {"torch", "deepspeed", "megatron", "numpy", "matplotlib", "rich"},
    "planner": {"torch", "deepspeed", "megatron"},
    "simulator": {"torch", "deepspeed", "megatron"},
    "render": {"torch", "deepspeed", "megatron"},
    "runtime": {"deepspeed", "megatron"},
    "adapters": set(),
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the whole name of what is imported"
            yield node.module or ""
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("layer", BELOW)
def test_imports_point_down(layer: str) -> None:
    for path in sorted((PACKAGE / layer).rglob("*.py")):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "recycle_plugin" and len(parts) > 1 and parts[1] in BELOW:
                assert parts[1] in BELOW[layer] | {layer}, f"{path.relative_to(PACKAGE)} imports {name}: {layer} stands below {parts[1]}"
            assert parts[0] not in FOREIGN[layer], f"{path.relative_to(PACKAGE)} imports {name}: not in {layer}"


@pytest.mark.parametrize("layer", ["", ".planner", ".simulator", ".render.grid"])
def test_importing_needs_no_framework(layer: str) -> None:
    script = f"import recycle_plugin{layer}, sys; print(sorted({{'torch', 'deepspeed', 'matplotlib'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
