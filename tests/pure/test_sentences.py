"""Everything public says what it is: a docstring that is a sentence of its own, as an editor shows it on hover."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import recycle_plugin

PACKAGE = Path(recycle_plugin.__file__).parent
FOLDERS = sorted({str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")})
OPENS_AS_A_PART = re.compile(r"\.\.\.|Of |As |``")  # of a sentence whose beginning stands elsewhere
CLOSES = (".", ":", "!", "?", ")")
WITHOUT = {"overload", "override", "setter"}  # decorators of what another definition speaks for

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """The public classes, methods and functions of a module or class, by their dotted names."""
    for node in getattr(tree, "body", ()):
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        marks = {getattr(mark, "attr", getattr(mark, "id", "")) for mark in node.decorator_list}
        if not marks & WITHOUT:
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from public(node, f"{prefix}{node.name}.")


def fault(text: str | None) -> str:
    """What is wrong with a docstring, or ""."""
    if not text:
        return "has no docstring"
    first = text.split("\n\n")[0].strip()
    if OPENS_AS_A_PART.match(first) or not first.endswith(CLOSES):
        return f"has a docstring that is no sentence of its own: {first[:80]!r}"
    return ""


def faults(source: str) -> list[str]:
    """What is wrong with the docstrings of a module and of everything public in it."""
    tree = ast.parse(source)
    said = ((f"line {node.lineno}: {name}", ast.get_docstring(node)) for name, node in public(tree))
    found = [f"{name} {wrong}" for name, text in said if (wrong := fault(text))]
    return found if ast.get_docstring(tree) or not tree.body else ["the module has no docstring", *found]


@pytest.mark.parametrize("folder", FOLDERS)
def test_everything_public_has_a_sentence_of_its_own(folder: str) -> None:
    found = {
        path.name: wrong for path in sorted((PACKAGE / folder).glob("*.py")) if (wrong := faults(path.read_text()))
    }
    assert not found, "\n".join(f"{folder}/{name}: {each}" for name, wrong in found.items() for each in wrong)


def module(*lines: str) -> str:
    return "\n".join(('"""A module."""', *lines))


def test_a_whole_sentence_is_fine() -> None:
    assert faults(module("def run():", '    """Runs.', "", "    ``fast``: or not.", '    """')) == []


def test_a_missing_docstring_is_found_wherever_it_is() -> None:
    source = module(
        "class Worker:", '    """A worker."""', "    def run(self): ...", "async def wait(): ...", "class Bare: ..."
    )
    assert [each.split(" has ")[0] for each in faults(source)] == [
        "line 4: Worker.run",
        "line 5: wait",
        "line 6: Bare",
    ]
    assert faults("x = 1") == ["the module has no docstring"]


@pytest.mark.parametrize(
    "text", ["... of ``step``.", "Of the worker.", "As core.loop's.", "``rank``: whose it is.", "No end", "  "]
)
def test_a_fragment_is_found(text: str) -> None:
    (found,) = faults(module("def run():", f'    """{text}"""'))
    assert found.startswith("line 2: run has")


def test_what_is_private_or_said_elsewhere_needs_none() -> None:
    private = ("def _run(): ...", "class _Worker:", "    def run(self): ...")
    speed = (
        "class Car:",
        '    """A car."""',
        "    @property",
        "    def speed(self):",
        '        """The speed in m/s."""',
        "    @speed.setter",
        "    def speed(self, value): ...",
        "    @override",
        "    def stop(self): ...",
    )
    assert faults(module(*private, *speed)) == []


def test_every_folder_of_the_package_is_looked_at() -> None:
    assert {"core/worker", "planner", "simulator/peers", "."} <= set(FOLDERS)
