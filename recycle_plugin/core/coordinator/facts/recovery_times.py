"""What was measured in a job of what its recoveries are made of: how long a process takes until its model is ready, and
how long a stage's state takes from a checkpoint.

The job's own start is the first measurement, and counts until somebody has come back: all processes start at once then,
and the slowest of them is what a recovery would wait for.
"""

from __future__ import annotations


class RecoveryTimes:
    """These times, in seconds; None as long as nothing was measured."""

    def __init__(self) -> None:
        self._supervised: dict[int, float] = {}  # by rank, when its supervisor came, which starts its process at that
        self._first: float | None = None
        self._again: float | None = None
        self._loaded: float | None = None
        self._written: float | None = None

    @property
    def start_up_s(self) -> float | None:
        """From the start of a process until its model was ready: that of the last one that has come back, or else of
        the slowest at the job's start.
        """
        return self._again if self._again is not None else self._first

    @property
    def load_s(self) -> float | None:
        """What a stage's state takes from a checkpoint: what it took the last time, or else what it took to be written
        there, of the slowest worker.
        """
        return self._loaded if self._loaded is not None else self._written

    def supervised(self, rank: int, now: float) -> None:
        """Takes in that the supervisor of ``rank`` is there."""
        self._supervised[rank] = now

    def ready(self, rank: int, now: float, due: float = 0.0, again: bool = False) -> None:
        """Takes in that the model of ``rank`` is ready.  ``due``: when its supervisor was to start it, 0 where nobody
        has said so; ``again``: it comes back.
        """
        began = max(due, self._supervised.get(rank, 0.0))
        if not began:
            return
        took = max(0.0, now - began)
        if again:
            self._again = took
        else:
            self._first = max(took, self._first or 0.0)

    def loaded(self, seconds: float) -> None:
        """Takes in how long a stage's state took from a checkpoint."""
        self._loaded = seconds

    def written(self, seconds: float) -> None:
        """Takes in how long the slowest worker's share of a checkpoint took; 0 where nobody has measured it."""
        self._written = seconds or self._written
