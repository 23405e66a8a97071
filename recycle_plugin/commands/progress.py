"""Progress lines on stderr while a command takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 4.0
FIRST = " (the first call on a machine also compiles the planner)"


@contextmanager
def told(what: Callable[[], str]) -> Iterator[None]:
    """Print ``what`` and the elapsed time on stderr every few seconds inside this context, if stderr is a terminal."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        hint = FIRST
        while not over.wait(EVERY_S):
            print(f"{what()}: {time.monotonic() - began:.0f} s so far{hint}", file=sys.stderr, flush=True)
            hint = ""

    if not sys.stderr.isatty():
        yield
        return
    telling = threading.Thread(target=tell, name="recycle: progress", daemon=True)
    telling.start()
    try:
        yield
    finally:
        over.set()
        telling.join()
