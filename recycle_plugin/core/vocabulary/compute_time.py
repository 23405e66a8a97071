"""The time that a worker has computed for in one step, by its own clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeTime:
    """A worker's times in one step, in microseconds.

    ``spent_us``: computing micro-batches.  ``nominal_us``: the plan's costs of the same work.  ``again_us``: the part
    of ``spent_us`` that went to another worker's micro-batches, or to work done before.  ``exchange_us``: the sum with
    the other replicas; most of it is waiting if this worker comes early.  ``own_us``: the part of the time since the
    step before in which the worker waited for nobody.  The last two are None for a step that a failure interrupted,
    and ``own_us`` also for the first step.
    """

    spent_us: int
    nominal_us: int
    again_us: int = 0
    exchange_us: int | None = None
    own_us: int | None = None
