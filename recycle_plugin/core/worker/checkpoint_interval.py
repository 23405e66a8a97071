"""The interval of automatic checkpoints: as often as their cost allows.

After CheckFreq (Mohan et al., FAST'21): the state is copied in memory and written while training goes on, and the
interval follows from the measured cost. The cost is all the time by which steps are longer than usual, from the step
that begins with the copy to the one in which the last file is written. Every worker has a :class:`CheckpointInterval`
and feeds it the same values, so all come to the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import ceil, sqrt
from statistics import fmean, median, median_low, stdev
from typing import NamedTuple

from recycle_plugin.core.vocabulary.commit_rule import unstarted

FIRST = 10  # steps before the first checkpoint: long enough to know how long a step takes
REMEMBERED = 20  # steps that count as usual
COSTS = 20  # checkpoints whose costs are remembered: any one may be measured in a bad moment
# times the usual cost, the most that is believed of a checkpoint; times FIRST, the most after the first one
DOUBTED = 10


class Cost(NamedTuple):
    """The cost of a checkpoint to one worker in seconds (negative if others slowed usual steps), and a usual step's."""

    seconds: float
    step_s: float


class CheckpointInterval:
    """The interval between automatic checkpoints in steps (``every``), and the step before which the next one is made
    (``due``). ``overhead``: what checkpoints may cost, as a share of the steps between them. ``fixed``: a checkpoint
    after each multiple of so many steps instead. ``at_once``: the first one is due before the first step.
    """

    def __init__(self, overhead: float, stepped: int, at_once: bool = False, fixed: int | None = None) -> None:
        self._overhead, self._fixed = overhead, fixed
        self._costs: deque[Cost] = deque(maxlen=COSTS)
        self.every = fixed or FIRST
        self.due = stepped + 1 if at_once else self._next(stepped + 1, 0)

    def _next(self, begun: int, free: int) -> int:
        """Return the step, at least ``free``, before which the next is due if the last was before step ``begun``."""
        if self._fixed is None:
            return max(begun + self.every, free)
        return max((begun - 1) // self._fixed + 1, ceil((free - 1) / self._fixed)) * self._fixed + 1

    def made(self, begun: int, costs: Collection[Cost], free: int) -> None:
        """Set the interval by the workers' ``costs`` of the checkpoint before ``begun``. ``free``: unstarted step."""
        self._costs.append(Cost(max(cost.seconds for cost in costs), median(cost.step_s for cost in costs)))
        step_s = median(cost.step_s for cost in self._costs)
        if self._fixed is None:
            self.every = max(1, ceil(self._expected() / (self._overhead * step_s)))
            if len(self._costs) == 1:
                self.every = min(self.every, DOUBTED * FIRST)
        self.due = self._next(begun, free)

    def _expected(self) -> float:
        """Return the seconds that the next checkpoint costs, with the error of the measurements added."""
        seconds = [cost.seconds for cost in self._costs]
        usual = median_low(seconds)
        believed = [min(each, DOUBTED * usual) if usual > 0 else each for each in seconds]
        return fmean(believed) + (stdev(believed) / sqrt(len(believed)) if len(believed) > 1 else 0.0)

    def failed(self, begun: int, free: int) -> None:
        """Go on after a failed checkpoint before ``begun``, which has no cost to learn. ``free``: unstarted step."""
        self.due = self._next(begun, free)

    def dropped(self, committed: int) -> None:
        """Make the next checkpoint due at once: the membership changed during a write, and all go on from
        ``committed``.
        """
        self.due = unstarted(committed)

    def joined(self, committed: int) -> None:
        """Forget all costs, unknown to a worker that has joined: all have to agree. The next one is due at once."""
        self._costs.clear()
        self.every, self.due = self._fixed or FIRST, unstarted(committed)

    def loaded(self, step: int) -> None:
        """Go on from the checkpoint of ``step``, which all have loaded."""
        self.due = self._next(step + 1, 0)


@dataclass
class Meter:
    """The clock of one worker's steps. It measures the cost of a checkpoint to the worker."""

    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _slowed: list[float] | None = None  # of a checkpoint's steps so far
    _last: float | None = None

    def tick(self, now: float) -> None:
        """Record that a step begins, and the one before ends, at ``now`` (seconds)."""
        if self._last is not None:
            (self._usual if self._slowed is None else self._slowed).append(now - self._last)
        self._last = now

    def begin(self) -> None:
        """Record that the step just begun begins with a checkpoint."""
        self._slowed = []

    def end(self) -> Cost:
        """Return the cost of the checkpoint whose last file was written before the step just begun."""
        slowed, self._slowed = self._slowed, None
        assert slowed is not None, "no step has begun with a checkpoint"
        step_s = median(self._usual or slowed)
        return Cost(sum(slowed) - step_s * len(slowed), step_s)

    def forget(self) -> None:
        """Drop all times: the membership has changed, so steps take another time."""
        self._usual.clear()
        self._slowed = None
