"""The predicted throughput of a plan, compared with that of the plan with everybody there."""

from __future__ import annotations

from recycle_plugin.core.vocabulary.step_batches import LiveShare


class Throughput:
    """Compares plans with the first plan, which is made for all workers."""

    def __init__(self) -> None:
        self._period_us = 0  # of a step with everybody there

    def resize(self, period_us: int) -> None:
        """Set the period with everybody there, in microseconds: steps have another number of micro-batches now."""
        self._period_us = period_us

    def share(self, period_us: int, live: LiveShare = LiveShare()) -> float:
        """Return a plan's throughput, relative to that with everybody there. ``live``: the contributing replicas."""
        self._period_us = self._period_us or period_us
        return round(self._period_us / period_us * live.live / live.total, 4) if period_us else 1.0
