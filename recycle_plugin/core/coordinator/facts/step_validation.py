"""Step validation: whether a step's gradients could be applied as they were, judged after it has been applied.

Clipping needs the norm over all stages, and a stage that waits for it before stepping loses its stagger. With ``clip:
validate`` a stage steps at once with unclipped gradients and sends its share of the norm; the coordinator judges once
it has all shares. Mostly the norm is below the limit, and nobody has waited. If it is not, or is not finite, the step
is *rejected*: all who have applied it take it back, everything computed with the rejected weights is discarded on all
stages, and the step is applied again with the known norm, or skipped.

Any worker of a stage may send its share; they hold the same gradient. A share stays good over failures.
"""

from __future__ import annotations

from math import fsum, inf, isfinite, sqrt

ROUNDING = 1e-6  # DeepSpeed clips by limit / (norm + 1e-6), as torch does


def over(norm: float, limit: float) -> bool:
    """Return whether gradients of this norm can't be applied unclipped; with ``limit`` 0 all finite ones can."""
    return not isfinite(norm) or norm + ROUNDING > (limit or inf)


class StepValidation:
    """Validates the steps of a job with ``stages`` of ``shards`` each, whose gradients are clipped to ``limit``.
    ``skips``: steps with a norm that is not finite are skipped. ``judged``, ``rejected``: steps so far.
    """

    def __init__(self, stages: int = 0, limit: float = 0.0, skips: bool = False, shards: int = 1) -> None:
        self._parts, self._limit, self._skips = stages * shards, limit, skips
        self._shares: dict[int, dict[tuple[str, int], float]] = {}  # by step, then (stage, shard)
        self._norms: dict[int, float] = {}  # of steps that are not committed
        self.judged = self.rejected = 0

    def add(self, step: int, share: dict[str, float], shard: int = 0) -> float | None:
        """Record a stage's share of the squared norm of ``step``. Return the norm if it rejects the step, else None."""
        if step in self._norms:
            return self._again(step, share)
        shares = self._shares.setdefault(step, {})
        shares.update({(stage, shard): value for stage, value in share.items()})
        if len(shares) < self._parts:
            return None
        norm = self._norms[step] = sqrt(fsum(shares.values()))
        self.judged, self.rejected = self.judged + 1, self.rejected + over(norm, self._limit)
        return self.rejection(step)

    def _again(self, step: int, share: dict[str, float]) -> float | None:
        """Handle a repeated share of the judged ``step``: its stage made its sum again after a failure. Other rounding
        changes nothing. But if the share is not finite any more the stage can't apply the step, so all must take back
        the step that they were to keep.
        """
        if all(map(isfinite, share.values())) or self.rejection(step) is not None:
            return None
        self._norms[step], self.rejected = inf, self.rejected + 1
        return inf

    def rejection(self, step: int) -> float | None:
        """Return the norm for which the uncommitted ``step`` was rejected; None if it was not."""
        norm = self._norms.get(step)
        return norm if norm is not None and over(norm, self._limit) else None

    def hopeless(self, norm: float) -> bool:
        """Return whether nobody may go on with gradients of this norm."""
        return not isfinite(norm) and not self._skips

    def discard_after(self, after: int) -> None:
        """Drop shares and norms of steps later than ``after``: they were computed with rejected weights."""
        self._shares = {step: shares for step, shares in self._shares.items() if step <= after}
        self._norms = {step: norm for step, norm in self._norms.items() if step <= after}

    def committed(self, step: int) -> None:
        """Drop ``step`` and all before it, which are committed."""
        self._shares = {each: shares for each, shares in self._shares.items() if each > step}
        self._norms = {each: norm for each, norm in self._norms.items() if each > step}
