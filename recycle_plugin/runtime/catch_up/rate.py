"""How much of a worker its newcomers may have: serving makes its steps a few per cent longer at most.

Copying is done by the thread that trains.  While that waits for others anyway, it may go on at once; otherwise it gets
a small share of the time that passes.  Hashing and sending are done by other threads, which take what the machine's
cores leave idle, and little more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

COPYING = 0.04  # of the time of the thread that trains
BURST_S = 0.01  # of copying, at once
OF_IDLE = 0.5  # of the cores that are idle, for each thread that sends
LEAST = 0.1  # of a core, where none is idle
LOOK_S = 0.05  # between two looks at the machine
ALONE = 0.25  # of these shares, where a stage has no other live worker: all wait for it


def idle_cores() -> Callable[[], float]:
    """A function that says how many cores have been idle since it was called last, 0.05 s ago or longer."""
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
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # which are among the others
    return times.idle + getattr(times, "iowait", 0.0), sum(times) - guest


class Rate:
    """The rate at which one worker serves all its newcomers.

    ``alone()``: whether its stage has no other live worker.  ``clock`` and ``idle`` are for tests.
    """

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
        """Whether its stage has no other live worker."""
        return self._alone()

    def may_copy(self, waiting: bool) -> bool:
        """Whether the thread that trains may copy now.  ``waiting``: it has nothing else to do."""
        now = self._clock()
        share = COPYING * (ALONE if self.alone() else 1.0)
        since = share * (now - self._at)  # all of it, where nobody could ask in between, as in a long instruction
        self._credit, self._at = min(max(BURST_S, since), self._credit + since), now
        self._waits = waiting
        return waiting or self._credit > 0

    def copied(self, seconds: float) -> bool:
        """Count what copying has taken; not while the thread would only have waited, which is returned."""
        waited, self._waits = self._waits, False
        self._credit -= 0.0 if waited else seconds
        return waited

    def rest_s(self, busy_s: float) -> float:
        """How long a thread that sends is to rest after ``busy_s`` seconds of a core's time."""
        share = min(1.0, max(LEAST, OF_IDLE * self._idle())) * (ALONE if self.alone() else 1.0)
        return busy_s * (1.0 / share - 1.0)
