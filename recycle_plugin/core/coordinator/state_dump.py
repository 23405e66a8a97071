"""The dump of a state machine of this package as JSON, and back. Every attribute of every object in it is found by
looking, so none can be forgotten. A new attribute needs nothing. One that does not survive this (an iterator, a lambda,
an object that two others share) is named with its place at the first :func:`dump`.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterable
from enum import Enum
from functools import cached_property
from importlib import import_module
from math import isfinite
from typing import Any

from recycle_plugin.core.messages.said import Sender

PLAIN = (type(None), bool, int, str)
VALUES = {kind.__name__: kind for kind in (tuple, set, frozenset)}
PACKAGE = "recycle_plugin.core"


def dump(thing: Any) -> Any:
    """Return the state of ``thing``, and of all objects in it, for json.dumps. TypeError names what is neither Python's
    own nor of a class of this package, and what two objects share, which would be two objects afterwards.
    """
    return _Dump().of(thing, type(thing).__name__)


def load(record: Any) -> Any:
    """Return the object of which ``record`` is a :func:`dump`, also over JSON. ValueError on anything else."""
    if type(record) in PLAIN or type(record) is float:
        return record
    if isinstance(record, list):
        return [load(one) for one in record]
    if not isinstance(record, dict) or len(record) != 1:
        raise ValueError(f"no dumped state: {str(record)[:120]}")
    ((name, content),) = record.items()
    if name == "float":
        return float(content)
    if name == "bytes":
        return b64decode(content)
    if name == "deque":
        return deque(load(content[0]), content[1])
    if name == "array":
        return array(content[0], load(content[1]))
    if name == "dict":
        return {load(key): load(value) for key, value in content}
    if name in VALUES:
        return VALUES[name](load(content))
    return _object(_class(name), content)


class _Dump:
    """A dump under way. ``of(thing, where)``: anything but plain values becomes an object with one key, its type."""

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}  # by identity, the place of each mutable object

    def of(self, thing: Any, where: str) -> Any:
        kind = type(thing)
        if kind in PLAIN or (kind is float and isfinite(thing)):
            return thing
        if kind is float:
            return {"float": str(thing)}
        if kind is bytes:
            return {"bytes": b64encode(thing).decode()}
        if kind in (set, frozenset):
            return {kind.__name__: sorted(self._each(thing, where), key=str)}
        if kind is tuple:
            return {"tuple": self._each(thing, where)}
        by_value: Any = kind.__hash__
        if by_value in (None, object.__hash__):
            self._once(thing, where)
        if kind is list:
            return self._each(thing, where)
        if kind is array:
            return {"array": [thing.typecode, self._each(thing, where)]}
        if kind is deque:
            return {"deque": [self._each(thing, where), thing.maxlen]}
        if kind is dict:
            return {
                "dict": [[self.of(key, where), self.of(value, f"{where}[{key!r}]")] for key, value in thing.items()]
            }
        return {_name(kind, where): self._content(thing, where)}

    def _content(self, thing: Any, where: str) -> Any:
        if isinstance(thing, Enum):
            return thing.value
        if isinstance(thing, tuple):  # a NamedTuple
            return self._each(thing, where)
        return {name: self.of(value, f"{where}.{name}") for name, value in _attributes(thing)}

    def _each(self, things: Iterable[Any], where: str) -> list[Any]:
        return [self.of(one, f"{where}[{place}]") for place, one in enumerate(things)]

    def _once(self, thing: Any, where: str) -> None:
        other = self._seen.setdefault(id(thing), where)
        if other != where:
            raise TypeError(f"{where} and {other} are one object, and would be two")


def _attributes(thing: Any) -> Iterable[tuple[str, Any]]:
    """Return the attributes of ``thing`` by name, without cached properties: a message that was read has another order
    than one that was made.
    """
    names = sorted(getattr(thing, "__slots__", None) or vars(thing))
    return (
        (name, getattr(thing, name))
        for name in names
        if not isinstance(getattr(type(thing), name, None), (cached_property, Sender))
    )


def _object(kind: type, content: Any) -> Any:
    if issubclass(kind, Enum):
        return kind(content)
    if issubclass(kind, tuple):
        return kind(*load(content))
    made = object.__new__(kind)
    for name, value in content.items():
        object.__setattr__(made, name, load(value))
    return made


def _name(kind: type, where: str) -> str:
    if not kind.__module__.startswith(PACKAGE + "."):
        raise TypeError(f"{where} is a {kind.__name__}, and nobody knows how to write that down")
    return f"{kind.__module__.removeprefix(PACKAGE + '.')}.{kind.__name__}"


def _class(name: str) -> type:
    """Return the class that :func:`_name` has named ``name``."""
    module, _, kind = name.rpartition(".")
    try:
        found = getattr(import_module(f"{PACKAGE}.{module}"), kind)
    except (ImportError, AttributeError):
        found = None
    if not isinstance(found, type):
        raise ValueError(f"no dumped state: it has a {name}, which nobody knows")
    return found
