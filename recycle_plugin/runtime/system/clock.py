"""The time of day for a process."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Return seconds since 1970 by a clock that is never set: deadlines stay right if the host's clock is set."""
    return _BEGAN + time.monotonic()


class Awake:
    """The time of day for a process that reads it often. If more than ``late_s`` seconds lie between two readings, the
    excess is left out: the process was stopped, and could receive nothing.
    """

    def __init__(self, late_s: float) -> None:
        self._late_s, self._looked, self._stopped_s = late_s, now(), 0.0

    def now(self) -> float:
        """Return seconds since 1970, less those for which the process was stopped."""
        before, self._looked = self._looked, now()
        self._stopped_s += max(0.0, self._looked - before - self._late_s)
        return self._looked - self._stopped_s
