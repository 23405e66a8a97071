"""Typed values from plain ones: objects of our classes from the numbers, texts, lists and dicts of a wire or a file.

Only what the annotations say is accepted. A dataclass or a named tuple is the list of its fields' values (on the wire),
or a dict by name (in files, where fields with a default may be missing). An enumeration's member is its value. What
does not fit becomes no exception but an :class:`Unreadable`, with the field's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from math import isfinite
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from recycle_plugin.core.vocabulary.cut_text import shown

T = TypeVar("T")
SCALARS = (NoneType, bool, int, float, str)
TEXT = frozenset({str})
Finite = Annotated[float, "neither infinite nor NaN"]
"""The annotation of a number that is no loss, no norm and no deadline, which may be never: a time, a duration."""
DEEPEST = 32  # lists and dicts within each other, in a field of any plain value


@dataclass(frozen=True)
class Unreadable:
    """A value that can't be read: ``what`` names the wrong part, mostly a field by its dotted name, and ``why``
    continues the sentence: "is '2', …".
    """

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what} {self.why}"


class _Wrong(Exception):
    """A value does not fit; :func:`read` makes an Unreadable of it."""

    def __init__(self, why: str, path: str = "") -> None:
        self.why, self.path = why, path


class TypeForm(NamedTuple):
    """How the values of one annotation are read. ``kinds``: types whose values stand as they are; ``make`` converts any
    other, or raises _Wrong. ``text``: equal for two forms if and only if they read the same values alike.
    """

    text: str
    kinds: frozenset[type]
    make: Callable[[Any], Any]


def read(kind: type[T], plain: Any, name: str) -> T | Unreadable:
    """Return the value of type ``kind`` that ``plain`` stands for, or an Unreadable, which calls it ``name``."""
    hint: Any = kind
    form = form_of(hint)
    try:
        value: T = plain if type(plain) in form.kinds else form.make(plain)
    except _Wrong as wrong:
        return Unreadable(f"{name}{wrong.path}", wrong.why)
    return value


def _part(form: TypeForm, plain: Any, name: object) -> Any:
    if type(plain) in form.kinds:
        return plain
    try:
        return form.make(plain)
    except _Wrong as wrong:
        wrong.path = f"{name}{wrong.path}"
        raise


def values(thing: object) -> tuple[Any, ...]:
    """Return the values of a dataclass's fields, as :func:`read` takes them back. Raises TypeError for others."""
    kind: Any = type(thing)
    return _getter(kind)(thing)


# --- forms, by annotation ------------------------------------------------------------------------


@cache
def form_of(hint: Any) -> TypeForm:
    """Return the form of the annotation ``hint``. Raises TypeError if there is no rule for it."""
    if hint is Any:
        return TypeForm("plain", frozenset(SCALARS), _plain)
    if hint in SCALARS:  # a whole number is a float too, and a flag is no number
        text = "None" if hint is NoneType else hint.__name__
        return TypeForm(text, frozenset({float, int} if hint is float else {hint}), _refusal(text))
    if hint == Finite:
        return TypeForm("finite float", frozenset(), _finite)
    if hint is bytes:  # only if the annotation says so: files have none
        return TypeForm("bytes", frozenset({bytes}), _refusal("bytes"))
    if get_origin(hint) in (Union, UnionType):
        return _union(list(map(form_of, get_args(hint))))
    if get_origin(hint) is tuple:
        return _tuple(get_args(hint))
    if get_origin(hint) is dict and get_args(hint)[0] is str:
        return _dict(form_of(get_args(hint)[1]))
    if is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")):
        return _record(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enumeration(hint)
    raise TypeError(f"nothing says how to read {hint}")


def _refusal(text: str) -> Callable[[Any], Any]:
    def make(plain: Any) -> Any:
        raise _Wrong(f"is {shown(plain)}, and it has to be {text}")

    return make


def _finite(plain: Any) -> float:
    if type(plain) is int or (type(plain) is float and isfinite(plain)):
        return plain
    raise _Wrong(f"is {shown(plain)}, and it has to be a finite float")


def _union(forms: list[TypeForm]) -> TypeForm:
    """Return the form of a union of scalars and at most one form that is none."""
    text, kinds = " | ".join(form.text for form in forms), frozenset().union(*(form.kinds for form in forms))
    makers = [form.make for form in forms if not form.kinds]
    if len(makers) > 1:
        raise TypeError(f"nothing says which of {text} a list is")
    return TypeForm(text, kinds, makers[0] if makers else _refusal(text))


def _enumeration(kind: type[Enum]) -> TypeForm:
    members = {member.value: member for member in kind}
    kinds = frozenset(map(type, members))
    text = f"{kind.__name__}({', '.join(map(repr, members))})"
    refuse = _refusal(text)
    return TypeForm(
        text,
        frozenset(),
        lambda plain: members[plain] if type(plain) in kinds and plain in members else refuse(plain),
    )


def _each(form: TypeForm, plain: list[Any]) -> list[Any]:
    """Return the values of a list, each read by ``form``; fast if all stand as they are."""
    if form.kinds.issuperset(map(type, plain)):
        return plain
    return [_part(form, one, [place]) for place, one in enumerate(plain)]


def _tuple(parts: tuple[Any, ...]) -> TypeForm:
    if parts[-1] is Ellipsis:
        form = form_of(parts[0])
        text, refuse = f"tuple[{form.text}, ...]", _refusal("a list")
        return TypeForm(
            text, frozenset(), lambda plain: tuple(_each(form, plain)) if type(plain) is list else refuse(plain)
        )
    forms = tuple(map(form_of, parts))
    text = f"tuple[{', '.join(form.text for form in forms)}]"
    places = [f"[{place}]" for place in range(len(forms))]
    return _fixed(tuple, text, places, forms, _tuple_of(len(forms)), _refusal(f"a list of {len(forms)}"))


def _dict(form: TypeForm) -> TypeForm:
    text = f"dict[str, {form.text}]"
    refuse = _refusal("a dict with texts for keys")

    def make(plain: Any) -> Any:
        if type(plain) is not dict or not TEXT.issuperset(map(type, plain)):
            refuse(plain)
        if form.kinds.issuperset(map(type, plain.values())):
            return plain
        return {key: _part(form, one, [key]) for key, one in plain.items()}

    return TypeForm(text, frozenset(), make)


def _fixed(
    kind: Any,
    text: str,
    paths: Sequence[str],
    forms: Sequence[TypeForm],
    build: Sequence[str],
    other: Callable[[Any], Any],
) -> TypeForm:
    """Return the form of a list of so many values, each of its own form. ``build``: lines of code that return the
    ``kind`` that has the values ``v0``, ``v1``, ... ``other`` makes what is no such list.

    Every message is read by such forms, so their functions are compiled: a loop over the fields takes twice
    as long.
    """
    scope = {"kind": kind, "new": object.__new__, "tuple_of": tuple.__new__, "built": _built, "Wrong": _Wrong}
    scope["other"] = other
    lines = [f"[{', '.join(f'v{place}' for place in range(len(forms)))}] = plain", "try:", " pass"]
    for place, (path, form) in enumerate(zip(paths, forms)):
        scope |= {f"kinds{place}": form.kinds, f"make{place}": form.make}
        lines.append(f" if type(v{place}) not in kinds{place}: path = {path!r}; v{place} = make{place}(v{place})")
    lines += ["except Wrong as wrong:", " wrong.path = path + wrong.path", " raise", *build]
    head = ["def make(plain):", f" if type(plain) is not list or len(plain) != {len(forms)}: return other(plain)"]
    exec("\n".join([*head, *(f" {line}" for line in lines)]), scope)  # nothing in it comes from a message
    return TypeForm(text, frozenset(), scope["make"])


def _tuple_of(count: int) -> list[str]:
    return [f"return tuple_of(kind, ({' '.join(f'v{place},' for place in range(count))}))"]


def _record(kind: Any) -> TypeForm:
    hints, names = get_type_hints(kind, include_extras=True), names_of(kind)
    forms = tuple(form_of(hints[name]) for name in names)
    text = f"{kind.__name__}({', '.join(f'{name}: {form.text}' for name, form in zip(names, forms))})"
    defaults, refuse = _defaults(kind), _refusal(f"a list of {len(forms)}")

    def other(plain: Any) -> Any:
        return _by_name(kind, dict(zip(names, forms)), defaults, plain) if type(plain) is dict else refuse(plain)

    return _fixed(kind, text, [f".{name}" for name in names], forms, _building(kind, names), other)


def _by_name(kind: type, forms: dict[str, TypeForm], defaults: frozenset[str], plain: dict[Any, Any]) -> Any:
    """Return the object of class ``kind`` from a dict of its fields by name, as files have it."""
    made = {}
    for name, form in forms.items():
        if name in plain:
            made[name] = _part(form, plain[name], f".{name}")
        elif name not in defaults:
            raise _Wrong("is missing", f".{name}")
    for name in sorted(map(str, plain.keys() - forms.keys())):
        raise _Wrong("is unknown", f".{name}")
    return _built(kind, **made)


def _building(kind: Any, names: tuple[str, ...]) -> list[str]:
    """Return the lines that make a ``kind`` of its fields' values; see :func:`_fixed`."""
    if not is_dataclass(kind):
        return _tuple_of(len(names))
    if hasattr(kind, "__post_init__") or hasattr(kind, "__slots__") or len(names) < len(fields(kind)):
        return [f"return built(kind, {', '.join(f'{name}=v{place}' for place, name in enumerate(names))})"]
    # its constructor would do nothing else, and take twice as long
    lines = [f"its[{name!r}] = v{place}" for place, name in enumerate(names)]
    return ["thing = new(kind)", "its = thing.__dict__", *lines, "return thing"]


def _built(kind: type, /, **made: Any) -> Any:
    """Return the object of class ``kind``. Values that its constructor refuses with ValueError are wrong."""
    try:
        return kind(**made)
    except ValueError as error:
        raise _Wrong(f"can't be: {error}") from error


def _plain(plain: Any, depth: int = 0) -> Any:
    """Return the value unchanged. Raises _Wrong unless it consists of plain values only."""
    if depth >= DEEPEST:
        raise _Wrong(f"is more than {DEEPEST} lists and dicts deep")
    if type(plain) is not list and not (type(plain) is dict and TEXT.issuperset(map(type, plain))):
        raise _Wrong(
            f"is {shown(plain)}, and it has to be made of numbers, texts, lists, and dicts with texts for keys"
        )
    for one in plain.values() if isinstance(plain, dict) else plain:
        if type(one) not in SCALARS:
            _plain(one, depth + 1)
    return plain


# --- classes -------------------------------------------------------------------------------------


@cache
def names_of(kind: Any) -> tuple[str, ...]:
    """Return the field names of a dataclass or named tuple in the order of its list; keyword-only fields come last."""
    if not is_dataclass(kind):
        names: tuple[str, ...] = kind._fields
        return names
    given = [each for each in fields(kind) if each.init]
    return tuple(each.name for each in sorted(given, key=lambda each: bool(each.kw_only)))


def _defaults(kind: Any) -> frozenset[str]:
    if not is_dataclass(kind):
        return frozenset(kind._field_defaults)
    return frozenset(
        each.name for each in fields(kind) if each.default is not MISSING or each.default_factory is not MISSING
    )


@cache
def _getter(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    if not is_dataclass(kind):
        raise TypeError(f"a {kind.__name__} can't be written down")
    names = names_of(kind)
    if not names:
        return lambda thing: ()
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda thing: (get(thing),)
