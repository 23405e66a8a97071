"""Waits for what nobody notifies of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

POLL_S = 0.005


def until(ready: Callable[[], object], what: str, within_s: float = 60.0) -> object:
    """What ``ready()`` gives, once that is true."""
    deadline = time.monotonic() + within_s
    while not (found := ready()):
        assert time.monotonic() < deadline, f"no {what} within {within_s:.0f} s"
        threading.Event().wait(POLL_S)
    return found
