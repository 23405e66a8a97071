"""When the survivors are too slow for the user, who then leaves it to a scheduler to find more workers."""

from __future__ import annotations


class ThroughputFloor:
    """``max_slowdown``: the share of the fault-free throughput that may be lost; None: any."""

    def __init__(self, max_slowdown: float | None = None) -> None:
        self._max_slowdown = max_slowdown
        self._period_us = 0  # of a step, as planned with everybody there

    def resize(self, period_us: int) -> None:
        """Steps have another number of micro-batches from now on: that is the period with everybody there."""
        self._period_us = period_us

    def throughput(self, period_us: int) -> float:
        """Of a plan with that period, where 1 is that of the plan with everybody there; which is the first."""
        self._period_us = self._period_us or period_us
        return round(self._period_us / period_us, 4) if period_us else 1.0

    def reason(self, throughput: float) -> str | None:
        """Why the job is to end with that, if it is."""
        if self._max_slowdown is None or 1 - throughput <= self._max_slowdown:
            return None
        return (
            f"predicted throughput {throughput:.0%} of the fault-free plan's, "
            f"and recycle.max_slowdown = {self._max_slowdown:g}"
        )
