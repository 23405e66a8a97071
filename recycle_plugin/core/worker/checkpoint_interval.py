"""The interval of automatic checkpoints: as often as what one costs allows.

After CheckFreq (Mohan et al., FAST'21): the state is copied in memory and written while training goes on, and the
interval follows from the measured cost.  Cost is all the time that steps take longer than usual, from the one that
begins with the copy to the one in which the last file is there.  Every worker has a :class:`CheckpointInterval` and
tells it the same, so that all come to the same step.
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
# times the usual cost: no more is believed of any one; nor, of the first one alone, an interval so many times the first
DOUBTED = 10


class Cost(NamedTuple):
    """The cost of one checkpoint to one worker: seconds in all (less than none where others have slowed down what
    counts as usual), and seconds of a usual step.
    """

    seconds: float
    step_s: float


class CheckpointInterval:
    """The interval between automatic checkpoints, in steps (``every``), and the step before which the next one is made
    (``due``).

    ``overhead``: what checkpoints may cost, as a share of the steps between them; ``fixed``: one behind each step that
    so many divide, in place of that; ``at_once``: the first one is due before the first step.
    """

    def __init__(self, overhead: float, stepped: int, at_once: bool = False, fixed: int | None = None) -> None:
        self._overhead, self._fixed = overhead, fixed
        self._costs: deque[Cost] = deque(maxlen=COSTS)
        self.every = fixed or FIRST
        self.due = stepped + 1 if at_once else self._next(stepped + 1, 0)

    def _next(self, begun: int, free: int) -> int:
        """The step before which one is due, where the last one was before step ``begun``; not before ``free``."""
        if self._fixed is None:
            return max(begun + self.every, free)
        return max((begun - 1) // self._fixed + 1, ceil((free - 1) / self._fixed)) * self._fixed + 1

    def made(self, begun: int, costs: Collection[Cost], free: int) -> None:
        """Sets the interval anew once the checkpoint before step ``begun`` is written, at the ``costs`` of each worker.

        ``free``: a step that nobody has started.
        """
        self._costs.append(Cost(max(cost.seconds for cost in costs), median(cost.step_s for cost in costs)))
        step_s = median(cost.step_s for cost in self._costs)
        if self._fixed is None:
            self.every = max(1, ceil(self._expected() / (self._overhead * step_s)))
            if len(self._costs) == 1:
                self.every = min(self.every, DOUBTED * FIRST)
        self.due = self._next(begun, free)

    def _expected(self) -> float:
        """The seconds that the next one costs, with what the measurements may be wrong by."""
        seconds = [cost.seconds for cost in self._costs]
        usual = median_low(seconds)
        believed = [min(each, DOUBTED * usual) if usual > 0 else each for each in seconds]
        return fmean(believed) + (stdev(believed) / sqrt(len(believed)) if len(believed) > 1 else 0.0)

    def failed(self, begun: int, free: int) -> None:
        """Goes on without the checkpoint before step ``begun``, which could not be written and says nothing of what one
        costs.

        ``free``: a step that nobody has started.
        """
        self.due = self._next(begun, free)

    def dropped(self, committed: int) -> None:
        """Makes the next checkpoint due at once: the membership has changed while one was written, and everybody goes
        on from ``committed``.
        """
        self.due = unstarted(committed)

    def joined(self, committed: int) -> None:
        """Begins anew behind ``committed``, since somebody has joined who knows nothing of earlier costs: all have to
        find the same step.  The next one is due at once.
        """
        self._costs.clear()
        self.every, self.due = self._fixed or FIRST, unstarted(committed)

    def loaded(self, step: int) -> None:
        """Goes on from the checkpoint of ``step``, which everybody has loaded."""
        self.due = self._next(step + 1, 0)


@dataclass
class Meter:
    """The clock of one worker's steps, which finds out what a checkpoint has cost it."""

    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _slowed: list[float] | None = None  # of a checkpoint's steps so far
    _last: float | None = None

    def tick(self, now: float) -> None:
        """Notes that a step begins at ``now`` (seconds), where the one before has ended."""
        if self._last is not None:
            (self._usual if self._slowed is None else self._slowed).append(now - self._last)
        self._last = now

    def begin(self) -> None:
        """Notes that the step that has just begun begins with a checkpoint."""
        self._slowed = []

    def end(self) -> Cost:
        """The cost of the checkpoint whose last file was there before the step that has just begun."""
        slowed, self._slowed = self._slowed, None
        assert slowed is not None, "no step has begun with a checkpoint"
        step_s = median(self._usual or slowed)
        return Cost(sum(slowed) - step_s * len(slowed), step_s)

    def forget(self) -> None:
        """Forgets all times: the membership has changed, and steps take another time."""
        self._usual.clear()
        self._slowed = None
