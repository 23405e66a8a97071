"""Compilation of the planner's loops: by numba, on the first call on a machine; cached on disk.

``planner.warm`` does it ahead of a failure.

What was compiled from other sources is not used: numba looks at a function's own file only, and not at what it calls
or what constants it has from elsewhere.  Neither is a damaged file: the function is compiled again.

Where nothing can be cached, since the disk is full or all that numba may write to is read-only, each process compiles
for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import njit

from recycle_plugin.core import vocabulary


@lru_cache
def sources() -> str:
    """A hash of all files that compiled loops have code or constants of: the planner's and the vocabulary's."""
    folders = Path(__file__).parent, Path(vocabulary.__file__).parent
    return hashlib.sha256(
        b"".join(path.read_bytes() for folder in folders for path in sorted(folder.glob("*.py")))
    ).hexdigest()


def _cached(function: Callable, **options: Any) -> Any:
    try:
        made = njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # numba's word for having no place to write to
        return njit(nogil=True, **options)(function)
    made._cache._cache_file._version += f" {sources()}"
    made._cache.load_overload = _or_none(made._cache)
    made._cache.save_overload = _where_possible(made._cache.save_overload)
    return made


def _or_none(cache: Any) -> Callable:
    load = cache.load_overload

    def loaded(*given: Any) -> Any:
        try:
            return load(*given)
        except Exception:  # bytes that are no pickle, or half a one, may raise anything
            _where_possible(cache.flush)()
            return None

    return loaded


def _where_possible(save: Callable) -> Callable:
    def saved(*given: Any) -> None:
        try:
            save(*given)
        except OSError:  # what was compiled is in memory
            pass

    return saved


def compiled(function: Callable) -> Any:
    """The function compiled by numba on its first call, and cached on disk where that is possible."""
    return _cached(function)


def inner(function: Callable) -> Any:
    """The function compiled for being called from compiled loops: it counts no references to the arrays in its
    arguments, which for tuples of arrays takes more time than the work itself (greedy: 2.5 times as long).  Hence it
    can't make or return arrays.
    """
    return _cached(function, _nrt=False)
