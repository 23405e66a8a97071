"""The account of serving one newcomer: bytes, speed, and limits. One event reports it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Served:
    """The account of one line. The training thread calls :meth:`copied`, the sending thread :meth:`sent`; the thread
    that ends the line reads it. ``clock`` is for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began, self._ended = clock, clock(), clock()
        self.bytes = 0
        self._waited_s = self._worked_s = 0.0  # of copying
        self._busy_s = self._rested_s = 0.0  # of sending
        self._alone = False

    def copied(self, seconds: float, waiting: bool) -> None:
        """Count a copy, made while the training thread was ``waiting``, or in its working time."""
        if waiting:
            self._waited_s += seconds
        else:
            self._worked_s += seconds

    def sent(self, count: int, busy_s: float, rest_s: float, alone: bool) -> None:
        """Count ``count`` bytes, the busy time and rest they took, and whether the stage had no other worker."""
        if not self.bytes:
            self._began = self._clock() - busy_s
        self.bytes += count
        self._busy_s, self._rested_s = self._busy_s + busy_s, self._rested_s + rest_s
        self._alone |= alone
        self._ended = self._clock()

    def details(self) -> dict[str, Any]:
        """Return the event's details: times in seconds, shares from 0 to 1.

        ``core_share``: the sending thread's mean share of a core; ``bubble_share``: the share of copying done while the
        training thread waited; ``held_by``: what limited it, in words.
        """
        seconds = self._ended - self._began
        busy_s, copied_s = self._busy_s + self._rested_s, self._waited_s + self._worked_s
        share = self._busy_s / busy_s if busy_s else 1.0
        return {
            "bytes": self.bytes,
            "seconds": round(seconds, 4),
            "bytes_per_s": round(self.bytes / seconds) if seconds else 0,
            "core_share": round(share, 3),
            "bubble_share": round(self._waited_s / copied_s, 3) if copied_s else 1.0,
            "held_by": self._held_by(share),
        }

    def __str__(self) -> str:
        told = self.details()
        return (
            f"{self.bytes / 1e6:.1f} MB of its stage's state in {told['seconds']:.2f} s, "
            f"{told['bytes_per_s'] / 1e6:.1f} MB/s, sending with {told['core_share']:.0%} of a core and copying "
            f"{told['bubble_share']:.0%} of it while it waited for others; {told['held_by']}"
        )

    def _held_by(self, share: float) -> str:
        if self._alone:
            return "held back since it is the last worker of its stage"
        return "held back since the cores are busy" if share < 1.0 else "not held back"
