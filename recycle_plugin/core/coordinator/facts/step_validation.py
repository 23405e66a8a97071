"""Step validation: whether a step's gradients could be applied as they were, judged after it has been applied.

Clipping needs the norm over all stages, and whoever waits for it before stepping is not staggered any more.  With
``clip: validate`` a stage steps at once, with the gradients as they are, and says its share of the norm; the
coordinator judges once it has every stage's.  Mostly the norm is below the limit, and nothing was waited for.  Where it
is not, or is not finite, the step is *rejected*: whoever has applied it takes it back, everything computed with the
rejected weights is discarded on all stages, and it is applied once more, clipped by the norm that is known now, or
skipped.

A stage's share comes from whichever of its workers says it; they hold the same gradient.  It stays good over failures.
"""

from __future__ import annotations

from math import fsum, inf, isfinite, sqrt

ROUNDING = 1e-6  # DeepSpeed, as torch, clips by limit / (norm + 1e-6)


def over(norm: float, limit: float) -> bool:
    """Whether gradients of this norm can't be applied as they are; with ``limit`` 0 any finite ones can."""
    return not isfinite(norm) or norm + ROUNDING > (limit or inf)


class StepValidation:
    """The validation of the steps of a job of ``stages`` of so many ``shards``, whose gradients are clipped to
    ``limit``.  ``skips``: steps whose norm is not finite are skipped.

    ``judged`` and ``rejected`` count the steps so far.
    """

    def __init__(self, stages: int = 0, limit: float = 0.0, skips: bool = False, shards: int = 1) -> None:
        self._parts, self._limit, self._skips = stages * shards, limit, skips
        self._shares: dict[int, dict[tuple[str, int], float]] = {}  # by stage and shard
        self._norms: dict[int, float] = {}  # of steps that are not committed
        self.judged = self.rejected = 0

    def add(self, step: int, share: dict[str, float], shard: int = 0) -> float | None:
        """Takes in a stage's share of the squared norm of ``step``; returns the norm, if with this share it is known,
        and the step is rejected, else None.
        """
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
        """Takes in a share of ``step``, which was judged, once more, from a stage whose sum was made again after a
        failure.

        That it is rounded otherwise changes nothing; but where it is not finite any more nobody there can apply it, and
        so all have to take the step back that they were to keep.
        """
        if all(map(isfinite, share.values())) or self.rejection(step) is not None:
            return None
        self._norms[step], self.rejected = inf, self.rejected + 1
        return inf

    def rejection(self, step: int) -> float | None:
        """The norm that ``step``, not committed yet, was rejected for; None where it was not."""
        norm = self._norms.get(step)
        return norm if norm is not None and over(norm, self._limit) else None

    def hopeless(self, norm: float) -> bool:
        """Whether nobody may go on with gradients of this norm."""
        return not isfinite(norm) and not self._skips

    def discard_after(self, after: int) -> None:
        """Forgets what was said of the steps after ``after``, which was computed with rejected weights."""
        self._shares = {step: shares for step, shares in self._shares.items() if step <= after}
        self._norms = {step: norm for step, norm in self._norms.items() if step <= after}

    def committed(self, step: int) -> None:
        """Forgets ``step`` and all before it, which are committed."""
        self._shares = {each: shares for each, shares in self._shares.items() if each > step}
        self._norms = {each: norm for each, norm in self._norms.items() if each > step}
