"""Message delays in a simulated cluster: every line, each way, has its own distance, and now and then something is held
up.

A line is one connection, so messages come out in the order in which they went in, as over TCP. Lines are independent: a
worker's message may come long after its supervisor's that it is dead, and one worker may hear of a commit when another
is a step ahead.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from random import Random

HELD_UP_US = (
    5_000,
    30_000,
    300_000,
)  # longest delays beside the distance: lost packets, a collector's pause, a full buffer


@dataclass(frozen=True)
class Weather:
    """The delays of lines, in microseconds. A share ``far`` of the lines are as long as ``far_us`` (least and most),
    others as ``near_us``. ``held_up``: the share of messages that are.
    """

    near_us: tuple[int, int]
    far: float = 0.0
    far_us: tuple[int, int] = (0, 0)
    held_up: float = 0.0


FAIR = Weather((300, 300))
UNEVEN = Weather((100, 2_000), 0.15, (5_000, 40_000), 0.01)
CLOSE = Weather((50, 300))  # between the workers of one seat
STORMY = Weather((100, 5_000), 0.3, (20_000, 90_000), 0.05)


class MessageDelays:
    """The delays of all lines; ``seed`` decides about every message."""

    def __init__(self, weather: Weather, seed: int) -> None:
        self._weather, self._seed = weather, seed
        self._lines: dict[Hashable, _Line] = {}

    def arrival(self, line: tuple, now_us: int) -> int:
        """Return when what goes into ``line``, one way, at ``now_us`` comes out, in us. Calls are in order of time."""
        return self._of(line).arrival(now_us)

    def hold(self, line: tuple, until_us: int) -> None:
        """Hold what goes into ``line`` from now on until at least ``until_us``."""
        self._of(line).hold(until_us)

    def _of(self, line: tuple) -> _Line:
        if line not in self._lines:
            self._lines[line] = _Line(self._weather, Random(f"{self._seed} {line}"))
        return self._lines[line]


class _Line:
    def __init__(self, weather: Weather, random: Random) -> None:
        self._random, self._held_up = random, weather.held_up
        self._distance_us = random.randint(*(weather.far_us if random.random() < weather.far else weather.near_us))
        self._last = 0

    def arrival(self, now_us: int) -> int:
        random, taken = self._random, self._distance_us
        if self._held_up and random.random() < self._held_up:
            taken += random.randrange(random.choice(HELD_UP_US))
        self._last = max(self._last, now_us + taken)
        return self._last

    def hold(self, until_us: int) -> None:
        self._last = max(self._last, until_us)
