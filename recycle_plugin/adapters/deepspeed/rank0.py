"""What stock DeepSpeed leaves to rank 0, done by another rank while that one is lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as dist


class _Comm:
    """deepspeed.comm with another answer of ``get_rank()``; ranks in groups are as they are."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def get_rank(self, group: Any = None) -> int:
        """The rank that this worker is taken for."""
        return self._rank if group is None else dist.get_rank(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


@contextmanager
def taken_for(rank: int, modules: str) -> Iterator[None]:
    """Inside of this context those modules of DeepSpeed whose names begin so, and nobody else, take this worker for
    ``rank``.
    """
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
    """Inside of this context ``owner`` has these ``values``, by the names of its attributes."""
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
    """Inside of this context stock code of ``engine`` does what it does on rank 0 if this worker is ``first``, and
    only then.
    """
    rank = 0 if first else max(1, engine.global_rank)
    with replaced(engine, global_rank=rank), taken_for(rank, "deepspeed.runtime.engine"):
        yield
