"""Compilation of the planner's loops by numba: on the first call on a machine, cached on disk, by ``planner.warm``
ahead of failures.

Code compiled from other sources is not used: numba looks at a function's own file only, not at what it calls or which
constants it takes from elsewhere. A damaged file is not used either: the function is compiled again. If nothing can be
cached, since the disk is full or read-only for numba, each process compiles for itself.
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
    """Return a hash of all files that compiled loops have code or constants of: the planner's and the vocabulary's."""
    folders = Path(__file__).parent, Path(vocabulary.__file__).parent
    return hashlib.sha256(
        b"".join(path.read_bytes() for folder in folders for path in sorted(folder.glob("*.py")))
    ).hexdigest()


def _cached(function: Callable, **options: Any) -> Any:
    try:
        made = njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # numba has no place to write to
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
    """Return the function compiled by numba on its first call, and cached on disk if possible."""
    return _cached(function)


def inner(function: Callable) -> Any:
    """Return the function compiled to be called from compiled loops. It counts no references to its array arguments,
    which for tuples of arrays takes longer than the work itself (greedy: 2.5 times as long). It can't make or return
    one.
    """
    return _cached(function, _nrt=False)
