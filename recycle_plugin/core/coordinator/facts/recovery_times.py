"""Measured parts of a recovery: how long a process takes until its model is ready, and how long a stage's state takes
to load from a checkpoint. The job's own start is the first measurement, and counts until a worker has come back. All
processes start at once then, and a recovery would wait for the slowest of them.
"""

from __future__ import annotations


class RecoveryTimes:
    """These times, in seconds; None until measured."""

    def __init__(self) -> None:
        self._supervised: dict[int, float] = {}  # by rank, when its supervisor came and started its process
        self._first: float | None = None
        self._again: float | None = None
        self._loaded: float | None = None
        self._written: float | None = None

    @property
    def start_up_s(self) -> float | None:
        """From a process's start until its model is ready: the last return's, else the slowest at the job's start."""
        return self._again if self._again is not None else self._first

    @property
    def load_s(self) -> float | None:
        """How long a stage's state took to load last time, else how long the slowest worker took to write it."""
        return self._loaded if self._loaded is not None else self._written

    def supervised(self, rank: int, now: float) -> None:
        """Record that the supervisor of ``rank`` has come."""
        self._supervised[rank] = now

    def ready(self, rank: int, now: float, due: float = 0.0, again: bool = False) -> None:
        """Record that a model is ready. ``due``: of the process's start, 0 if unknown. ``again``: it comes back."""
        began = max(due, self._supervised.get(rank, 0.0))
        if not began:
            return
        took = max(0.0, now - began)
        if again:
            self._again = took
        else:
            self._first = max(took, self._first or 0.0)

    def loaded(self, seconds: float) -> None:
        """Record how long a stage's state took to load from a checkpoint."""
        self._loaded = seconds

    def written(self, seconds: float) -> None:
        """Record how long the slowest worker's share of a checkpoint took to write; 0 if not measured."""
        self._written = seconds or self._written
