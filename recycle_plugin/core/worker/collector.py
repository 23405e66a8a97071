"""Python's collector of cycles, kept out of urgent work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Let the collector rest inside this context: for code that makes many objects, and no cycles, while all wait. A
    collection also looks at all that torch and the script have made, 0.3 s and more, and many objects bring several.
    """
    rests = not gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not rests:
            gc.enable()
