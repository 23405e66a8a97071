"""Who is stopped or stuck: deadlines on what workers are at, as a state machine without clock or sockets.

A worker's *beat* comes from a thread of its own and says what the worker is at and how many instructions it has
finished; its supervisor's *pulse* says that the process is there and whether it is stopped.  To evict a healthy worker is
as bad as to miss a dead one, hence:

* Whoever waits for somebody else is not to blame, however long that takes.
* Whoever computes one and the same instruction beyond the deadline is; an instruction computes only once its inputs are
  there.  The deadline is the larger of the setting and three median steps.
* What may take long (the script's own code, data, a checkpoint, the first step, which may compile) has the long deadline,
  and that only counts while somebody waits.
* A process that is stopped is lost after the deadline, whatever it was at.  That is the supervisor's word: a worker whose
  interpreter is held up, say by a large pickle, sends no beats, and is healthy.
* Where neither beats nor pulses come, the host is gone, or cut off: it has a deadline of its own, which no step lengthens.

Time passes here by ticks, and a late tick counts as little more than one in time: while the coordinator itself was
stopped or starved, nobody else could be heard.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Iterable

from recycle_plugin.core.protocol import Beat, Heard, Pulse
from recycle_plugin.core.roster import WorkerId

TICK_S = 0.25  # how often time is to be told
LATE_S = 2 * TICK_S  # no more than this is taken to have passed between two ticks
COMPUTES, WAITS, ELSEWHERE = "computes", "waits", "is in"
STEPS = 3  # times the median step: the deadline of slow jobs
REMEMBERED = 20  # steps that the median is over


def promise_s(progress_s: float, heartbeat_s: float) -> float:
    """For how long after a beat nobody is given up for silence: what is left of either deadline where time is told late."""
    return min(progress_s, heartbeat_s - LATE_S - TICK_S)


@dataclass
class Sign:
    """The last that was heard of a worker, by :attr:`Watch.clock`."""

    heard: float  # from itself or its supervisor
    pulse: float  # its process was seen running
    beat: float
    since: float  # it is at the same
    promised: float = 0.0  # not to be given up for its silence before
    stopped: bool = False
    last: Beat | None = None


@dataclass
class Watch:
    """``progress_s``: the deadline of an instruction; ``idle_s``: of what may take long; ``heartbeat_s``: of a host that is
    silent, which is found within it.  Of nobody before ``admit``."""

    progress_s: float = inf
    idle_s: float = inf
    heartbeat_s: float = inf
    clock: float = 0.0
    _ticked: float | None = None
    _signs: dict[WorkerId, Sign] = field(default_factory=dict)
    _intervals: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _committed_at: float | None = None

    def admit(self, workers: Iterable[WorkerId]) -> None:
        self._signs = {worker: Sign(self.clock, self.clock, self.clock, self.clock) for worker in workers}

    def dismiss(self, worker: WorkerId) -> None:
        self._signs.pop(worker, None)

    def pulse(self, message: Pulse) -> None:
        sign = self._signs.get(message.worker)
        if sign is not None:
            sign.heard, sign.stopped = self.clock, message.stopped
            if not message.stopped:
                sign.pulse = self.clock

    def beat(self, message: Beat) -> Heard:
        """The answer, without a promise before the start.  The promise holds also where the deadline shrinks, and where this clock, told the time now and then, lags."""
        sign = self._signs.get(message.worker)
        answer = Heard(message.number, promise_s(self.deadline_s, self.heartbeat_s) if sign is not None else 0.0)
        if sign is not None:
            if sign.last is None or (message.done, message.at, message.what) != (sign.last.done, sign.last.at, sign.last.what):
                sign.since = self.clock
            sign.last, sign.promised = message, self.clock + LATE_S + answer.for_s
            sign.heard = sign.beat = self.clock
        return answer

    def committed(self, now: float) -> None:
        """One more step is."""
        if self._committed_at is not None:
            self._intervals.append(now - self._committed_at)
        self._committed_at = now

    @property
    def deadline_s(self) -> float:
        """Of an instruction, now."""
        return max(self.progress_s, STEPS * median(self._intervals)) if self._intervals else self.progress_s

    def tick(self, now: float) -> dict[WorkerId, str]:
        """``now``: seconds.  Workers that are overdue, and what they have done."""
        if self._ticked is not None:
            self.clock += min(max(now - self._ticked, 0.0), LATE_S)
        self._ticked = now
        found = {worker: self._blame(worker, sign) for worker, sign in self._signs.items()}
        return {worker: why for worker, why in found.items() if why}

    def _blame(self, worker: WorkerId, sign: Sign) -> str:
        silent, stopped, deadline = self.clock - sign.heard, self.clock - max(sign.pulse, sign.beat), self.deadline_s
        if silent > self.heartbeat_s - TICK_S and self.clock > sign.promised:
            return f"nothing was heard of it or its supervisor for {silent:.1f} s (deadline {self.heartbeat_s:.1f} s)"
        if sign.stopped and stopped > deadline and self.clock > sign.promised:
            return f"its process is stopped for {stopped:.1f} s (deadline {deadline:.1f} s)"
        if sign.last is None:
            return ""
        same = self.clock - (sign.beat if sign.last.at == WAITS else sign.since)
        if sign.last.at == COMPUTES and self._committed_at is not None and same > deadline:
            return f"it computes {sign.last.what} for {same:.1f} s (deadline {deadline:.1f} s)"
        if same > self.idle_s and any(other.last is not None and other.last.at == WAITS for each, other in self._signs.items() if each != worker):
            what = "it says nothing" if sign.last.at == WAITS else f"it {sign.last.at} {sign.last.what}"
            return f"{what} for {same:.1f} s, and others wait (deadline {self.idle_s:.1f} s)"
        return ""
