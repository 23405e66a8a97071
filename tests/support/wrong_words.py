"""Messages with any values of their types, some of them near what a job is at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from random import Random
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from recycle_plugin.core.messages import from_workers
from recycle_plugin.core.messages.from_workers import Hello, LogFolder
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.typed import names_of
from tests.support.membership import job

KINDS = [
    kind
    for kind in vars(from_workers).values()
    if isinstance(kind, type) and kind.__module__ == from_workers.__name__ and kind not in (Hello, LogFolder)
]
TEXTS = ("", "plan", "loss", "norm", "share", "0", "1", "0.0", "0.1", "9.9", "params 0@1", "wgrad 0@2", "a b", "saving")
NUMBERS = (-1, 0, 1, 2, 3, 7, 99, 10**9)
PLAIN = (None, 1, "x", [1, "x"], {"x": {}})


def wrong_word(kind: type, random: Random, near: Sequence[int] = ()) -> Any:
    """A message of ``kind`` whose fields are drawn, each from values of its type.  ``near``: numbers that come up more
    often than others.
    """
    numbers = (*NUMBERS, *near, *near)
    while True:
        try:
            return _made(kind, random, numbers)
        except ValueError:  # no such values go together
            continue


def _made(hint: Any, random: Random, numbers: Sequence[int]) -> Any:
    again = lambda of: _made(of, random, numbers)
    few = range(random.choice((0, 1, 1, 2)))
    if hint is JobSpec:
        return job(micro_batches=random.choice((0, 1, 2)), replicas=random.choice((0, 1, 2, 99)))
    if get_origin(hint) in (Union, UnionType):
        return again(random.choice(get_args(hint)))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return tuple(again(parts[0]) for _ in few) if parts[-1] is Ellipsis else tuple(map(again, parts))
    if get_origin(hint) is dict:
        return {random.choice(TEXTS): again(get_args(hint)[1]) for _ in few}
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        hints, usual = get_type_hints(hint), _defaults(hint)
        given = [name for name in names_of(hint) if name not in usual or random.random() < 0.5]
        return hint(**{name: again(hints[name]) for name in given})  # type: ignore[operator]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return random.choice(list(hint))
    values: dict[Any, Sequence[Any]] = {
        int: numbers,
        str: TEXTS,
        bool: (True, False),
        bytes: (b"", b"x" * 100),
        float: (-1.0, 0.0, 1.5),
        NoneType: (None,),
        Any: PLAIN,
    }
    return random.choice(values[hint])


def _defaults(kind: Any) -> set[str]:
    if not is_dataclass(kind):
        return set(kind._field_defaults)
    return {each.name for each in fields(kind) if (each.default, each.default_factory) != (MISSING, MISSING)}
