"""Which boundaries of a pipeline to log: selective logging (SWIFT, Zhong et al., PPoPP'23).

A log of every boundary lets each stage be replayed by itself, and may be more than the disk holds. Stages without a
logged boundary between them are one *group*: a failure of either makes both replay, and what crosses between them is
made and sent again. The model of a recovery is SWIFT's, with the log's reading added:

* a group's time for a step is the sum of three: the recompute time of its stages; the bytes over its inner boundaries,
  divided by the network's bandwidth; the step's bytes in the log, divided by the bandwidth of reading it;
* a failure comes, on average, in the middle between two checkpoints: a recovery loads a checkpoint, and takes the
  group's time for half of the steps between them;
* the expected time of a recovery is the sum over stages of a stage's probability to fail times its group's time;
* the log of a boundary takes the bytes that cross it in a step, both ways, times the steps between two checkpoints.

Logging more is not always better: a log that is read slowly may cost more than a neighbour's replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import NamedTuple

from recycle_plugin.core.vocabulary.log_boundaries import AUTO, at_start, groups, in_words

GAIN = 0.1  # of the expected time, which another choice has to win if the current one is within the budget


@dataclass(frozen=True)
class Line:
    """A pipeline whose stages stand in a line; boundary i is between stages i and i + 1.

    ``recompute_s``: seconds of a step of each stage in a replay; ``boundary_bytes``: what crosses each boundary in a
    step, both ways; ``failure``: each stage's probability to be the one that fails; ``hosts``: of each stage;
    ``load_s``: seconds to load a checkpoint; ``every``: steps from one checkpoint to the next.
    """

    recompute_s: tuple[float, ...]
    boundary_bytes: tuple[int, ...]
    failure: tuple[float, ...]
    hosts: tuple[str, ...]
    load_s: float
    every: int
    network_bytes_per_s: float
    read_bytes_per_s: float

    @property
    def stages(self) -> int:
        return len(self.recompute_s)

    def log_bytes(self, logged: Sequence[int]) -> int:
        """Return the bytes of the log of these boundaries when it is largest, just before a checkpoint."""
        return self.every * sum(self.boundary_bytes[each] for each in logged)

    def recovery_s(self, first: int, end: int) -> float:
        """Return the seconds of a recovery of the group of stages ``first`` to ``end - 1``, in constant time."""
        return self.replay_s(first, end, self.every / 2)

    def replay_s(self, first: int, end: int, steps: float) -> float:
        """Return the seconds in which that group loads a checkpoint and replays ``steps`` steps."""
        return self.load_s + steps * self.step_s(first, end)

    def step_s(self, first: int, end: int) -> float:
        """Return the seconds of a step of that group in a replay."""
        crossing = (0, *self.boundary_bytes, 0)  # nothing crosses the line's ends
        sent, read = self._sent, crossing[first] + crossing[end]
        return (
            self._computed[end]
            - self._computed[first]
            + (sent[end - 1] - sent[first]) / self.network_bytes_per_s
            + read / self.read_bytes_per_s
        )

    def share_s(self, first: int, end: int) -> float:
        """Return the part of the expected time that is this group's."""
        return (self._failing[end] - self._failing[first]) * self.recovery_s(first, end)

    def expected_s(self, logged: Sequence[int]) -> float:
        """Return the expected seconds of a recovery if these boundaries are logged, given in order."""
        return sum(self.share_s(first, end) for first, end in groups(logged, self.stages))

    @cached_property
    def _computed(self) -> tuple[float, ...]:
        return (0.0, *accumulate(self.recompute_s))

    @cached_property
    def _failing(self) -> tuple[float, ...]:
        return (0.0, *accumulate(self.failure))

    @cached_property
    def _sent(self) -> tuple[int, ...]:
        return (0, *accumulate(self.boundary_bytes))


@dataclass(frozen=True)
class Selection:
    """The boundaries that are ``logged``, in order, what their log takes with a checkpoint ``every`` so many steps, and
    the time of a recovery: expected, and of the slowest group. ``budget``: the bytes that the log may take, None for no
    limit; ``fits``: it takes no more.
    """

    logged: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    every: int
    log_bytes: int
    expected_s: float
    worst_s: float
    budget: int | None

    @property
    def fits(self) -> bool:
        return self.budget is None or self.log_bytes <= self.budget

    def __str__(self) -> str:
        room = "" if self.budget is None else f", {self._of_budget} {in_bytes(self.budget)}"
        return (
            f"{in_words(self.logged, self.groups[-1][1])}; {in_bytes(self.log_bytes)} between checkpoints, one every "
            f"{self.every} steps{room}; a recovery takes {self.expected_s:.3g} s on average, {self.worst_s:.3g} s "
            "if the slowest group fails"
        )

    @property
    def _of_budget(self) -> str:
        return "within the budget of" if self.fits else "more than the budget of"


def in_bytes(count: int) -> str:
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB") if count >= 1e5 else (1e3, "kB")
    return f"{count / unit:.4g} {name}"


def choose(line: Line, boundaries: str | Sequence[int], budget: int | None = None) -> Selection:
    """Return the boundaries to log within ``budget`` bytes: ``auto`` the best ones, ``all``, ``hosts`` those between
    hosts, or a list's, whatever they take. Raises ValueError for others.
    """
    return selection(line, best(line, budget) if boundaries == AUTO else at_start(boundaries, line.hosts), budget)


def choose_anew(line: Line, logged: Sequence[int], budget: int | None) -> Selection:
    """Return the current choice, which logs ``logged``; or the best one, if that is much better, or only that is within
    the budget. Measurements vary, and the choice should not change with each checkpoint.
    """
    now, other = selection(line, logged, budget), choose(line, AUTO, budget)
    return now if now.fits and other.expected_s > (1 - GAIN) * now.expected_s else other


def selection(line: Line, logged: Sequence[int], budget: int | None) -> Selection:
    """Return the cost of logging these boundaries, given in order."""
    together = groups(logged, line.stages)
    worst = max(line.recovery_s(*group) for group in together)
    size, expected = line.log_bytes(logged), line.expected_s(logged)
    return Selection(tuple(logged), together, line.every, size, expected, worst, budget)


class _Prefix(NamedTuple):
    """A way to log the boundaries up to one that is logged."""

    crossing: int  # bytes of a step
    expected_s: float
    logged: tuple[int, ...]


def best(line: Line, budget: int | None = None) -> tuple[int, ...]:
    """Return the boundaries with the least expected recovery time within ``budget`` bytes, the smallest of equals.

    A dynamic program over the last group: of the ways to log what is before it, only those matter to which no other is
    as small and as quick. Costs S² · F for S stages and F such ways: at most S if all boundaries are alike, else the
    number of different sums of their bytes within the budget (a knapsack problem), at most 2^S.
    """
    room = inf if budget is None else budget // line.every if line.every else inf
    ways: list[list[_Prefix]] = [[_Prefix(0, 0.0, ())]]
    for end in range(1, line.stages + 1):
        last = end == line.stages
        crossing, logged = (0, ()) if last else (line.boundary_bytes[end - 1], (end - 1,))
        ways.append(
            _least(
                _Prefix(way.crossing + crossing, way.expected_s + line.share_s(first, end), way.logged + logged)
                for first in range(end)
                for way in ways[first]
                if way.crossing + crossing <= room
            )
        )
    return ways[-1][-1].logged


def _least(ways: Iterator[_Prefix]) -> list[_Prefix]:
    """Return the ways to which no other is as small and as quick, from smallest and slowest to largest and quickest."""
    found: list[_Prefix] = []
    for way in sorted(ways):
        if not found or way.expected_s < found[-1].expected_s:
            found.append(way)
    return found
