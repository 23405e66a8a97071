"""A process without a descriptor left, by its real limit."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def none_left(pid: int) -> Iterator[None]:
    """The process ``pid`` can open nothing meanwhile; what is open stays so."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    folder = f"/proc/{pid}/fd"
    open_now = {int(name) for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")}  # but the listing's
    free = next(number for number in range(len(open_now) + 1) if number not in open_now)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
