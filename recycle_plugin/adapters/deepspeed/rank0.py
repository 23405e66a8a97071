"""Lets another rank do what stock DeepSpeed leaves to rank 0, if that is lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as dist


class _Comm:
    """deepspeed.comm with another global ``get_rank()``; ranks in groups are unchanged."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def get_rank(self, group: Any = None) -> int:
        return self._rank if group is None else dist.get_rank(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


@contextmanager
def taken_for(rank: int, modules: str) -> Iterator[None]:
    """A context in which DeepSpeed's modules whose names start with ``modules`` take this worker for ``rank``."""
    theirs: list[Any] = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(modules) and getattr(module, "dist", None) is dist
    ]
    for module in theirs:
        module.dist = _Comm(rank)
    try:
        yield
    finally:
        for module in theirs:
            module.dist = dist


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which attributes of ``owner`` have these ``values``."""
    kept = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


@contextmanager
def first_for_stock(engine: Any, first: bool) -> Iterator[None]:
    """A context in which stock code of ``engine`` treats this worker as rank 0 exactly if it is ``first``."""
    rank = 0 if first else max(1, engine.global_rank)
    with replaced(engine, global_rank=rank), taken_for(rank, "deepspeed.runtime.engine"):
        yield
