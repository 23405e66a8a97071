"""The throughput floor: when the survivors are too slow for the user, who then leaves it to a scheduler to find more
workers.
"""

from __future__ import annotations

from recycle_plugin.core.vocabulary.step_batches import LiveShare


class ThroughputFloor:
    """The lowest throughput that the user accepts.  ``max_slowdown``: the share of the fault-free throughput that may
    be lost; None: any.
    """

    def __init__(self, max_slowdown: float | None = None) -> None:
        self._max_slowdown = max_slowdown
        self._period_us = 0  # of a step, as planned with everybody there

    def resize(self, period_us: int) -> None:
        """Takes ``period_us``, in microseconds, for the period with everybody there, since steps have another number of
        micro-batches from now on.
        """
        self._period_us = period_us

    def throughput(self, period_us: int, share: LiveShare = LiveShare()) -> float:
        """The throughput of a plan with period ``period_us``, where 1 is that of the plan with everybody there; which
        is the first.  ``share``: which part of the replicas contributes to its steps.
        """
        self._period_us = self._period_us or period_us
        return round(self._period_us / period_us * share.live / share.total, 4) if period_us else 1.0

    def reason(self, throughput: float) -> str | None:
        """The reason why the job is to end at this throughput, or None where it may go on."""
        if self._max_slowdown is None or 1 - throughput <= self._max_slowdown:
            return None
        return (
            f"predicted throughput {throughput:.0%} of the fault-free plan's, "
            f"and recycle.max_slowdown = {self._max_slowdown:g}"
        )
