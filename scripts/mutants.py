"""Mechanical mistakes in a module's functions: what scripts/mutate.py makes, one at a time.

A mutant replaces one node of a function's syntax tree: a condition is dropped, a comparison swapped, a call skipped, a
number is off by one, or a piece of state is not set.  Left alone is what no test could or should see: texts,
annotations, defaults, what is raised, asserted or only said, and what is set in ``__init__``, which nothing works
without.

A mutant is named by module, function, kind and the text of its statement before and after, never by its line; so is its
place in a sample.  The same seed gives the same mutants, whatever else is added to the code.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

DROPPED, SWAPPED, SKIPPED, OFF, UNSET = (
    "condition dropped",
    "comparison swapped",
    "call skipped",
    "off by one",
    "state not set",
)
KINDS = (DROPPED, SWAPPED, SKIPPED, OFF, UNSET)
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OTHER = {"min": "max", "max": "min"}
SAID = {"say", "note", "Note", "WeakPoint", "round"}  # calls that nothing but a reader depends on
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
FIRST = 40  # of a sample: drawn from all alike; behind them each module that has none yet gets one


@dataclass(frozen=True)
class Mutant:
    """``nth``: of those with the same texts in its function; ``place``: which change of its module it is."""

    module: str
    function: str
    kind: str
    before: str
    after: str
    nth: int
    line: int
    place: int

    @cached_property
    def name(self) -> str:
        return self.hashed("")[:12]

    def hashed(self, seed: object) -> str:
        return hashlib.sha256(
            "\0".join(
                map(str, (seed, self.module, self.function, self.kind, self.before, self.after, self.nth))
            ).encode()
        ).hexdigest()


@dataclass(frozen=True)
class Change:
    """``new`` in the place of a child of ``parent``: its ``field``, and there ``index`` where that is a list."""

    function: str
    statement: ast.AST  # the innermost one around it, or the case of a match
    kind: str
    parent: ast.AST
    field: str
    index: int | None
    new: ast.AST

    @property
    def line(self) -> int:
        return getattr(self.statement, "pattern", self.statement).lineno

    def apply(self) -> ast.AST:
        """Returns what stood there."""
        place, key = (
            (vars(self.parent), self.field) if self.index is None else (getattr(self.parent, self.field), self.index)
        )
        old, place[key] = place[key], self.new
        return old

    def texts(self) -> tuple[str, str]:
        """The statement before and after, without what is in its body."""
        before = header(self.statement)
        old = self.apply()
        after = "pass" if old is self.statement else header(self.statement)
        Change(self.function, self.statement, self.kind, self.parent, self.field, self.index, old).apply()
        return before, after


def mutants(source: str, module: str) -> list[Mutant]:
    """All of a module."""
    met: Counter[tuple[str, ...]] = Counter()
    found = []
    for place, change in enumerate(changes(ast.parse(source))):
        key = change.function, change.kind, *change.texts()
        if key[2] != key[3]:
            found.append(Mutant(module, *key, met[key], change.line, place))
            met[key] += 1
    return found


def sample(found: Iterable[Mutant], seed: int) -> list[Mutant]:
    """All of them in the order in which they are tried: any number of the first ones is a fair sample, and contains the
    shorter ones.
    """
    drawn = sorted(found, key=lambda mutant: mutant.hashed(seed))
    ahead, seen = drawn[:FIRST], {mutant.module for mutant in drawn[:FIRST]}
    for mutant in drawn[FIRST:]:
        if mutant.module not in seen:
            ahead.append(mutant)
            seen.add(mutant.module)
    taken = set(ahead)
    return ahead + [mutant for mutant in drawn if mutant not in taken]


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """The module's tree with it in place."""
    tree = ast.parse(source)
    change = next(change for place, change in enumerate(changes(tree)) if place == mutant.place)
    change.apply()
    return ast.fix_missing_locations(tree)


def install(source: str, mutant: Mutant, file: str) -> None:
    """Give the function of the loaded module the mutant's code, so that whoever has imported it runs that.

    Raises LookupError where the module has no such function that could be changed.
    """
    codes = list(_codes(compile(mutated(source, mutant), file, "exec")))
    for function in _functions(sys.modules[mutant.module], mutant.function):
        old = function.__code__
        for code in codes:
            if (code.co_name, code.co_firstlineno, code.co_freevars) == (
                old.co_name,
                old.co_firstlineno,
                old.co_freevars,
            ):
                function.__code__ = code
                return
    raise LookupError(f"{mutant.module} has no function {mutant.function} to be changed")


# --- what can be changed ---------------------------------------------------------------------------------


def changes(tree: ast.Module) -> Iterator[Change]:
    """All changes of a module, in the order of its text."""
    for function, node in functions(tree.body, ""):
        if node.name != "__repr__":
            for index, statement in enumerate(node.body):
                yield from _within(function, statement, statement, node, "body", index)


def functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods; one inside another belongs to that."""
    for node in body:
        if isinstance(node, FUNCTION):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}.")


def _within(
    function: str, node: ast.AST, statement: ast.AST, parent: ast.AST, field: str, index: int | None
) -> Iterator[Change]:
    if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert, ast.pattern)) or _only_said(node):
        return
    for kind, new in _instead(node, parent, field, function):
        yield Change(function, statement, kind, parent, field, index, new)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for number, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                yield from _within(
                    function,
                    child,
                    child if isinstance(child, (ast.stmt, ast.match_case)) else statement,
                    node,
                    name,
                    number,
                )


def _only_said(node: ast.AST) -> bool:
    """A call that says something, or a statement that is nothing but one (whoever sends it)."""
    call = node.value if isinstance(node, ast.Expr) else node
    while isinstance(call, ast.Call):
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in SAID:
            return True
        call = call.args[0] if isinstance(node, ast.Expr) and len(call.args) == 1 else None
    return False


def _instead(node: ast.AST, parent: ast.AST, field: str, function: str) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.BoolOp):
        for index in range(len(node.values)):
            left = node.values[:index] + node.values[index + 1 :]
            yield DROPPED, left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield DROPPED, node.operand
    if (field == "test" and isinstance(parent, (ast.If, ast.IfExp))) or field == "ifs":
        yield DROPPED, ast.Constant(True)
    if field == "test" and isinstance(parent, (ast.If, ast.IfExp, ast.While)):
        yield DROPPED, ast.Constant(False)
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            yield (
                SWAPPED,
                ast.Compare(
                    node.left, [*node.ops[:index], SWAPS[type(op)](), *node.ops[index + 1 :]], node.comparators
                ),
            )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OTHER:
        yield SWAPPED, ast.Call(ast.Name(OTHER[node.func.id], ast.Load()), node.args, node.keywords)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not ast.unparse(node).startswith("super()"):
        yield SKIPPED, ast.Pass()
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.YieldFrom):
        yield SKIPPED, ast.Expr(ast.YieldFrom(ast.Tuple([], ast.Load())))  # it stays a generator
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield OFF, ast.Constant(node.value + 1)
        if node.value > 0:
            yield OFF, ast.Constant(node.value - 1)
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)) and not function.endswith("__init__"):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        if isinstance(node, ast.AugAssign) or any(
            isinstance(part, (ast.Attribute, ast.Subscript))
            for each in targets
            for part in getattr(each, "elts", [each])
        ):
            yield UNSET, ast.Pass()


def header(statement: ast.AST) -> str:
    """Its text without the statements in it."""
    kept = {
        name: getattr(statement, name)
        for name in ("body", "orelse", "handlers", "finalbody", "cases")
        if hasattr(statement, name)
    }
    try:
        for name in kept:
            setattr(statement, name, [ast.Pass()] if name == "body" else [])
        return ast.unparse(statement).strip().removesuffix("\n    pass")
    finally:
        for name, value in kept.items():
            setattr(statement, name, value)


# --- where it goes ---------------------------------------------------------------------------------------


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _functions(module: Any, qualname: str) -> list[FunctionType]:
    found = module
    for part in qualname.split("."):
        found = vars(found).get(part)
    return list(_unwrapped(found))


def _unwrapped(found: Any) -> Iterator[FunctionType]:
    """Functions behind properties, caches and other decorators."""
    if isinstance(found, FunctionType):
        yield found
    for name in ("__wrapped__", "__func__", "fget", "fset", "func"):
        if hasattr(found, name):
            yield from _unwrapped(getattr(found, name))
