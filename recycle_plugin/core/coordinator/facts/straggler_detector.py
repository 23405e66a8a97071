"""A straggler detector: which workers are slow, by measured over planned compute time, compared within a stage.

A worker's *relative time* is the time of its F, I, W and B of a step over what the cost model expects of just these. It
does not depend on the amount of work, so taking work off a slow worker does not make it look fast. An announced level
changes only if the relative time was more than 30% away from it for three steps in a row, in the same direction. So
noise around any level, also around the one at which a worker counts as slow, changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median, median_low

from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Group, Roster, WorkerId

WIDTH = 1.3
LIKE_OTHERS = 1.1  # the relative time below which a slow worker is so no longer
STEPS = 3
GRAIN = 10  # percent: plans for 200 and for 203 would be the same


class StragglerDetector:
    """The straggler detector of a job. ``percent``: announced slow seats, their time in percent of the usual one."""

    def __init__(self) -> None:
        self.percent: dict[Seat, int] = {}
        self._said: dict[int, dict[WorkerId, ComputeTime]] = {}
        self._recent: dict[Seat, deque[float]] = {}
        self._compared = False  # since the last call of news()

    def add(self, worker: WorkerId, step: int, time: ComputeTime) -> None:
        """Record what ``step`` took a worker."""
        self._said.setdefault(step, {})[worker] = time

    def committed(self, step: int, roster: Roster) -> None:
        """Compare compute times up to ``step`` within stages, now that all members have sent theirs. O(members)."""
        if min(self._said, default=step + 1) > step:
            return
        said = {older: self._said.pop(older) for older in sorted(self._said) if older <= step}
        self._compared = True
        for times in said.values():
            for stage in roster.live_stages:
                self._compare(_by_seat(times, roster.stage(stage)))
        for seat in (self.percent.keys() | self._recent.keys()) - roster.seats:
            self.percent.pop(seat, None)
            self._recent.pop(seat, None)

    def _compare(self, measured: Mapping[Seat, float]) -> None:
        if len(measured) > 1:
            # the faster of two: the other may be slow, and nobody is fast by mistake
            usual = median_low(measured.values())
            for seat, relative in measured.items():
                self._recent.setdefault(seat, deque(maxlen=STEPS)).append(max(1.0, relative / usual))

    def news(self) -> dict[Seat, int]:
        """Return the seats that have left their announced compute time, with the new one in percent, and announce it.
        O(seats).
        """
        if not self._compared:
            return {}
        self._compared, found = False, {}
        for seat, recent in sorted(self._recent.items()):
            known = self.percent.get(seat, 100)
            if len(recent) == STEPS and (
                min(recent) > known / 100 * WIDTH or max(recent) < max(known / 100 / WIDTH, LIKE_OTHERS)
            ):
                percent = round(100 * median(recent) / GRAIN) * GRAIN if median(recent) > WIDTH else 100
                if percent != known:
                    found[seat] = percent
        self.percent = {seat: percent for seat, percent in {**self.percent, **found}.items() if percent != 100}
        return found


def _by_seat(times: Mapping[WorkerId, ComputeTime], members: Group) -> dict[Seat, float]:
    """Return by seat its slowest shard's compute time over the planned one; the other shards wait for that shard."""
    slowest: dict[Seat, float] = {}
    for member in members:
        time = times.get(member.worker)
        if time is not None and time.spent_us and time.nominal_us:
            slowest[member.seat] = max(slowest.get(member.seat, 0.0), time.spent_us / time.nominal_us)
    return slowest
