"""Compilation of the planner's loops by numba: on the first call on a machine, cached on disk, by ``planner.warm``
ahead of failures.

Code compiled from other sources is not used: numba looks at a function's own file only, not at what it calls or which
constants it takes from elsewhere, so all files are compared here. Comments and docstrings don't count. A damaged file
is not used either: the function is compiled again. If nothing can be cached, since the disk is full or read-only for
numba, each process compiles for itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import njit

from recycle_plugin.core import vocabulary

DOCSTRING, COMMENT = re.compile(rb'"{3}[\s\S]*?"{3}'), re.compile(rb"#.*")  # to parse all files takes 0.4 s


@lru_cache
def sources() -> str:
    """Return a hash of the code in all files that compiled loops have code or constants of: the planner's and the
    vocabulary's.
    """
    folders = Path(__file__).parent, Path(vocabulary.__file__).parent
    return code_hash([path.read_bytes() for folder in folders for path in sorted(folder.glob("*.py"))])


def code_hash(files: Iterable[bytes]) -> str:
    """Return a hash of Python files without comments and docstrings; compiled loops have no strings."""
    return hashlib.sha256(b"\0".join(COMMENT.sub(b"", DOCSTRING.sub(b"", each)) for each in files)).hexdigest()


def _cached(function: Callable, **options: Any) -> Any:
    try:
        made = njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # numba has no place to write to
        return njit(nogil=True, **options)(function)
    made._cache._cache_file._source_stamp = sources()  # instead of the function's own file's time and size
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
