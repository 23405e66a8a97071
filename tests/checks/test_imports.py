"""What tests share stands in tests/support, in jobs' scripts or in planted mistakes: no test needs another's file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = ("tests.support", "tests.jobs", "tests.mistakes", "tests.tiers")


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The modules of tests/ that a file in ``package`` imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            within = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*within, *filter(None, [node.module])])
            names = [f"{module}.{each.name}" for each in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == "tests")


def not_shared(tree: ast.AST, package: str) -> list[str]:
    return [name for name in imported(tree, package) if not f"{name}.".startswith(tuple(f"{each}." for each in SHARED))]


def test_a_file_imports_of_the_tests_only_what_is_shared() -> None:
    found = {}
    for path in (ROOT / "tests").rglob("*.py"):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        if names := not_shared(ast.parse(path.read_text()), package):
            found[str(path.relative_to(ROOT))] = names
    assert not found


@pytest.mark.parametrize(
    ("line", "found"),
    (
        ("from tests.pure.test_replay import lose", "tests.pure.test_replay.lose"),
        ("import tests.pure.test_replay as replay", "tests.pure.test_replay"),
        ("from tests.pure import test_replay", "tests.pure.test_replay"),
        ("from .conftest import golden", "tests.pure.conftest.golden"),
        ("from ..cluster import conftest", "tests.cluster.conftest"),
        ("def late():\n    from . import test_replay", "tests.pure.test_replay"),
    ),
)
def test_each_way_to_import_another_test_is_seen(line: str, found: str) -> None:
    assert not_shared(ast.parse(line), "tests.pure") == [found]
