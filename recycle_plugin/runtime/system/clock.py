"""The time of day for a process."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Return seconds since 1970 by a clock that is never set: deadlines stay right if the host's clock is set."""
    return _BEGAN + time.monotonic()
