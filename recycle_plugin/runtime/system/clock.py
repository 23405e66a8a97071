"""The time of day, as a process counts it."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970 by a clock that nobody sets: deadlines and durations stay right where a host sets its own."""
    return _BEGAN + time.monotonic()
