"""Limits on what newcomers may take of a worker: serving makes its steps a few per cent longer at most.

The training thread copies. While it waits for others it may copy freely, otherwise for a small share of the time. Other
threads hash and send; they take the machine's idle cores, and little more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

COPYING = 0.04  # share of the training thread's time
BURST_S = 0.01  # seconds of copying at once
OF_IDLE = 0.5  # share of the idle cores, per sending thread
LEAST = 0.1  # of a core, if none is idle
LOOK_S = 0.05  # seconds between two readings of the machine
ALONE = 0.25  # factor if the stage has no other live worker: all wait for it


def idle_cores() -> Callable[[], float]:
    """Return a function that returns the number of cores idle since its last reading, at least 0.05 s ago."""
    seen = [time.monotonic(), *_times(), float(os.cpu_count() or 1)]

    def look() -> float:
        now = time.monotonic()
        if now - seen[0] >= LOOK_S:
            idle, total = _times()
            passed = total - seen[2]
            seen[:] = [now, idle, total, (os.cpu_count() or 1) * (idle - seen[1]) / passed if passed > 0 else 0.0]
        return seen[3]

    return look


def _times() -> tuple[float, float]:
    times = psutil.cpu_times()
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in the others too
    return times.idle + getattr(times, "iowait", 0.0), sum(times) - guest


class Rate:
    """The rate at which one worker serves all newcomers; ``alone()``: the last of its stage. The rest is for tests."""

    def __init__(
        self,
        alone: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
        idle: Callable[[], float] | None = None,
    ) -> None:
        self._alone, self._clock, self._idle = alone, clock, idle or idle_cores()
        self._credit, self._at = BURST_S, clock()
        self._waits = False

    def alone(self) -> bool:
        """Return whether the stage has no other live worker."""
        return self._alone()

    def may_copy(self, waiting: bool) -> bool:
        """Return whether the training thread may copy now; ``waiting``: it has nothing else to do."""
        now = self._clock()
        share = COPYING * (ALONE if self.alone() else 1.0)
        since = share * (now - self._at)  # all of it, if nobody could ask in between, as in a long instruction
        self._credit, self._at = min(max(BURST_S, since), self._credit + since), now
        self._waits = waiting
        return waiting or self._credit > 0

    def copied(self, seconds: float) -> bool:
        """Count the seconds of a copy against the share, unless the thread would only have waited; returns if so."""
        waited, self._waits = self._waits, False
        self._credit -= 0.0 if waited else seconds
        return waited

    def rest_s(self, busy_s: float) -> float:
        """Return how long a sending thread must rest after ``busy_s`` seconds of CPU time."""
        share = min(1.0, max(LEAST, OF_IDLE * self._idle())) * (ALONE if self.alone() else 1.0)
        return busy_s * (1.0 / share - 1.0)
