"""The mean losses of a job's steps and evaluations, for scripts of newcomers, which run through all of them again. They
are as the coordinator has told them to all. Each takes 8 bytes, for as long as the job lasts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from math import nan

from recycle_plugin.core.messages.from_coordinator import Recorded
from recycle_plugin.core.vocabulary.losses import Loss, mean

PIECE = 5_000  # numbers in one message
ANOTHER_STATE = "the others loaded a checkpoint during training, which a script that comes back can't repeat alone"


class Recorder:
    """The record of a job that began with the state after ``began`` steps."""

    def __init__(self, began: int = 0) -> None:
        self._began = began
        self._losses = array("d")
        self._unknown: set[int] = set()  # earlier steps of which no loss is known
        self._evaluations = array("d")
        self._refused = ""
        self._unfilled: list[int] = []

    @property
    def evaluations(self) -> int:
        return len(self._evaluations)

    def lost(self, step: int, losses: Mapping[str, Loss]) -> None:
        """Record the losses of ``step``, by micro-batch; a step that runs again replaces its first losses."""
        place = step - self._began
        if place >= 1 and losses:
            self._unknown.update(range(self._began + len(self._losses) + 1, step))
            self._unknown.discard(step)
            _put(self._losses, place, losses)

    def evaluated(self, number: int, losses: Mapping[str, Loss]) -> None:
        """Record the losses of an evaluation. The first evaluation has number 1."""
        if losses:
            _put(self._evaluations, number, losses)

    def unfilled(self, step: int) -> None:
        """Record that all plain iterators had ended before ``step`` was filled, and scripts were told so."""
        self._unfilled.append(step)

    def rewind(self, step: int) -> None:
        """Record that all have loaded a checkpoint of ``step`` while they trained, which newcomers can't follow."""
        self._refused = f"{ANOTHER_STATE} (of step {step})"

    def told(self, committed: int, steps: int = 0, evaluations: int = 0) -> Iterator[Recorded]:
        """Yield at least one message with what a newcomer must know of later steps than ``steps``, up to ``committed``,
        and of later ``evaluations``.
        """
        first, ended = max(steps - self._began, 0), len(self._evaluations) - evaluations
        losses = self._losses[first : max(committed - self._began, 0)]
        numbers = [*self._evaluations[evaluations:], *losses]  # a script hears of evaluations before later steps
        for begin in range(0, max(len(numbers), 1), PIECE):
            end = min(begin + PIECE, len(numbers))
            middle = min(max(ended, begin), end)
            yield Recorded(
                self._began + first + max(begin - ended, 0) + 1,
                tuple(numbers[middle:end]),
                evaluations + min(begin, ended) + 1,
                tuple(numbers[begin:middle]),
                committed,
                tuple(sorted(step for step in self._unknown if step <= committed)),
                self._refused,
                unfilled=tuple(self._unfilled),
            )


def _put(numbers: array[float], place: int, losses: Mapping[str, Loss]) -> None:
    """Set the number at ``place``, counted from 1, to the mean loss."""
    numbers.extend([nan] * (place - len(numbers)))
    numbers[place - 1] = mean(losses)
