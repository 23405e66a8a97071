"""Where an instruction has to be made known: the documents' list is that of the modules that tell those that end a step
apart.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from recycle_plugin.core.vocabulary.instruction import STAGE_WIDE

PACKAGE = Path(__file__).parents[2] / "recycle_plugin"
ENDS = {op.name for op in STAGE_WIDE}


def named(source: str) -> set[str]:
    tree = ast.parse(source)
    made = {
        target.id
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef) and each.name == "Op"
        for one in each.body
        if isinstance(one, ast.Assign)
        for target in one.targets
    }
    return made | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Op"
    }


def documented() -> tuple[list[str], list[str]]:
    """The modules of the document's table, which know every instruction of their kind, and those below it, which know
    those that are special there.
    """
    section = (PACKAGE / "docs/extending.md").read_text().partition("## An instruction\n")[2].partition("\n#")[0]
    table = re.findall(r"^\| `(\S+\.py)`", section, re.MULTILINE)
    return table, [name for name in re.findall(r"`((?!tests/)\S+\.py)`", section) if name not in table]


def untold(ends: set[str]) -> set[str]:
    """Modules of the table that do not know all of them."""
    return {name for name in documented()[0] if ends - named((PACKAGE / name).read_text())}


def test_the_document_names_every_module_that_tells_them_apart() -> None:
    """Which is to name most of them."""
    apart = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if len(ENDS & named(path.read_text())) > len(ENDS) / 2
    }
    table, special = documented()
    assert sorted(table + special) == sorted(apart)


def test_each_module_of_the_table_knows_all_of_them() -> None:
    assert not untold(ENDS)


def test_one_that_nobody_was_told_of_is_missed_in_each() -> None:
    assert untold(ENDS | {"IMAGINARY"}) == set(documented()[0]) and len(documented()[0]) == 6


@pytest.mark.parametrize(
    "source, found",
    [
        ("class Op(Enum):\n    F = 'F'", {"F"}),
        ("a = {Op.TIE: 1, Ops.B: 2}", {"TIE"}),
        ("def f(op):\n    return op.STEP", set()),
    ],
)
def test_names_are_found(source, found) -> None:
    assert named(source) == found
