"""A failure detector: who is stopped or stuck, by what workers are at, as a state machine without clock or sockets.

A worker's *heartbeat* comes from a thread of its own and says what the worker is at and how many instructions it has
finished; its *supervisor heartbeat* says that the process is there, whether it is stopped, and how much CPU it has
used.  To evict a healthy worker is as bad as to miss a dead one, hence:

* Whoever waits for somebody else is not to blame, however long that takes.
* Whoever computes one and the same instruction beyond the deadline is; an instruction computes only once its inputs are
  there.  One that computes, by what its process uses of the CPU, has longer than one that does nothing.
* What has cost one worker is no proof against the next: where a peer runs the same work and takes long over it too, it
  is the work that takes long.
* What may take long (the script's own code, data, a checkpoint, the first step, which may compile) has the long
  deadline, and that only counts while somebody waits.
* A process that is stopped is lost after the deadline, whatever it was at.  That is the supervisor's word: a worker
  whose interpreter is held up, say by a large pickle, sends no heartbeats, and is healthy.
* Where neither kind of heartbeat comes, the host is gone, or cut off: it has a deadline of its own, which no step
  lengthens.

What this finds are suspicions; who is given up for them core/coordinator/stalls.py decides.  The deadlines are
core/vocabulary/deadlines.py's.  Time passes here by ticks, and a late tick counts as little more than one in time:
while the coordinator itself was stopped or starved, nobody else could be heard.  A tick looks at all workers only if
one of them may have become suspect since the last look: a few times in the shortest deadline, as long as all go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import NamedTuple

from recycle_plugin.core.messages.activity import COMPUTES, WAITS
from recycle_plugin.core.messages.from_coordinator import Lease
from recycle_plugin.core.messages.from_workers import Heartbeat, SupervisorHeartbeat
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.deadlines import LATE_S, SUSPECTED, TICK_S, Deadlines
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.roster import WorkerId

REMEMBERED = 20  # steps that the median is over
BUSY = 0.2  # of a core: who uses more is at work
Work = tuple[int, str]  # of a step, what
FRESH_S = 2.0  # a heartbeat that is older says nothing of now


class Suspicion(NamedTuple):
    """A worker has owed something for ``for_s`` seconds: what, in words, for how long that is all right (``limit_s``),
    and what is known about it.  ``work``: of an instruction, what it is for.
    """

    what: str
    for_s: float
    limit_s: float
    known: str = ""
    work: Work | None = None
    cause: Cause = Cause.STUCK

    @property
    def raised(self) -> bool:
        """Whether it is worth a word: a third of the time is over."""
        return self.for_s > SUSPECTED * self.limit_s

    @property
    def overdue(self) -> bool:
        """Whether the worker has owed it for longer than is all right."""
        return self.for_s > self.limit_s

    def __str__(self) -> str:
        return f"{self.what} for {self.for_s:.1f} s{self.known and ', '}{self.known}"


@dataclass
class Sign:
    """The last that was heard of a worker, in seconds of :attr:`FailureDetector.clock`."""

    heard: float  # from itself or its supervisor
    supervisor_heartbeat: float  # its process was seen running
    heartbeat: float
    since: float  # it is at the same
    leased_until: float = 0.0  # not to be given up for its silence before
    stopped: bool = False
    cpu_s: float | None = None  # that its process has used, None where nobody can tell
    cpu_since_s: float | None = None  # the same when it began what it is at
    last: Heartbeat | None = None


@dataclass
class FailureDetector:
    """The failure detector over the workers of a job; it knows nobody before ``admit``."""

    deadlines: Deadlines = Deadlines()
    clock: float = 0.0
    _ticked: float | None = None
    _signs: dict[WorkerId, Sign] = field(default_factory=dict)
    _waiting: set[WorkerId] = field(default_factory=set)  # those whose last heartbeat says so
    _quiet_until: float = 0.0  # before that nobody can become suspect, by all that was heard
    _intervals: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _step_s: float = 0.0  # the median of these, 0 where it is not known
    _lease_s: float = field(init=False)
    _committed_at: float | None = None
    _committed_step: int = 0
    _all_wait_since: float | None = None
    _costly: set[Work] = field(default_factory=set)  # that has cost a worker, of steps that are not committed

    def __post_init__(self) -> None:
        self._set_lease()

    def admit(self, workers: Iterable[WorkerId]) -> None:
        """Begins to observe ``workers``."""
        for worker in workers:
            self.observe(worker)

    def observe(self, worker: WorkerId) -> None:
        """Begins to observe one more worker."""
        self._signs[worker] = Sign(self.clock, self.clock, self.clock, self.clock)
        self._waiting.discard(worker)
        self._quiet_until = 0.0

    def dismiss(self, worker: WorkerId) -> None:
        """Stops observing ``worker``."""
        self._signs.pop(worker, None)
        self._waiting.discard(worker)

    def supervisor_heartbeat(self, message: SupervisorHeartbeat) -> None:
        sign = self._signs.get(message.worker)
        if sign is not None:
            sign.heard, sign.stopped, sign.cpu_s = self.clock, message.stopped, message.cpu_s
            if not message.stopped:
                sign.supervisor_heartbeat = self.clock

    def heartbeat(self, message: Heartbeat) -> Lease:
        """Takes in a worker's heartbeat; returns the answer, whose lease is 0 before the start.

        The lease holds also where the deadline shrinks, and where this clock, told the time now and then, lags.
        """
        sign = self._signs.get(message.worker)
        answer = Lease(message.number, self._lease_s if sign is not None else 0.0)
        if sign is not None:
            last = sign.last
            if last is None or message.done != last.done or message.at != last.at or message.what != last.what:
                sign.since, sign.cpu_since_s = self.clock, sign.cpu_s
                (self._waiting.add if message.at == WAITS else self._waiting.discard)(message.worker)
            sign.last, sign.leased_until = message, self.clock + LATE_S + answer.for_s
            sign.heard = sign.heartbeat = self.clock
        return answer

    def ran(self, worker: WorkerId) -> None:
        """Takes in that ``worker`` has said something that it can't have said while its process was stopped.

        One that is stopped twice, and has gone on in between, may do so between two heartbeats.
        """
        sign = self._signs.get(worker)
        if sign is not None:
            sign.heard = sign.supervisor_heartbeat = self.clock

    def last(self, worker: WorkerId) -> Heartbeat | None:
        """The last heartbeat of ``worker``; None where there is none."""
        sign = self._signs.get(worker)
        return sign.last if sign is not None else None

    def doing(self, worker: WorkerId) -> tuple[str, str, float]:
        """The activity of ``worker``, in the words of its heartbeats, or that it can't be doing anything; and for how
        many seconds.
        """
        sign = self._signs[worker]
        if sign.stopped:
            return "is stopped", "", self.clock - max(sign.supervisor_heartbeat, sign.heartbeat)
        if sign.last is None or self.clock - sign.heartbeat >= FRESH_S:
            return "says nothing", "", self.clock - sign.heartbeat
        return sign.last.at, sign.last.what, self.clock - sign.since

    def committed(self, step: int, now: float) -> None:
        """Notes that ``step`` and all before it are committed at ``now`` (seconds): who was at one of them last is so
        no more.
        """
        if self._committed_at is not None:
            self._intervals.append(now - self._committed_at)
            self._step_s = median(self._intervals)
            self._set_lease()
        self._committed_at = now
        self._committed_step = step
        self._costly = {work for work in self._costly if work[0] > step}

    def rewind(self, step: int) -> None:
        """Goes on from the state of ``step``, from a checkpoint, in place of the last one."""
        self._committed_step = step

    def has_cost(self, work: Work | None) -> None:
        """Notes that ``work`` has cost a worker, which gives it the long deadline."""
        if work is not None:
            self._costly.add(work)

    def tick(self, now: float) -> dict[WorkerId, Suspicion]:
        """Moves the clock to ``now`` (seconds); returns the suspicions that are worth a word, by worker."""
        if self._ticked is not None:
            self.clock += min(max(now - self._ticked, 0.0), LATE_S)
        self._ticked = now
        if not self._everybody_waits():
            self._all_wait_since = None
        elif self._all_wait_since is None:
            self._all_wait_since = self.clock
        return self._suspicions() if self.clock >= self._quiet_until else {}

    def _suspicions(self) -> dict[WorkerId, Suspicion]:
        """The suspicions that are worth a word.  Costs one look at each worker, and a second one at those that may be
        suspect: by whatever rule, nobody is so that was heard, and has got on, within the shortest deadline.
        """
        deadlines = self.deadlines
        silent_s = SUSPECTED * (deadlines.heartbeat_timeout_s - TICK_S)
        same_s = SUSPECTED * min(deadlines.progress_timeout_s, deadlines.busy_timeout_s, deadlines.idle_timeout_s)
        found: dict[WorkerId, Suspicion] = {}
        left = inf
        for worker, sign in self._signs.items():
            silent = self.clock - sign.heard
            same = self.clock - (sign.heartbeat if sign.last is None or worker in self._waiting else sign.since)
            left = min(left, silent_s - silent, same_s - same)
            if silent > silent_s or same > same_s:
                suspicion = self._suspicion(sign, len(self._waiting) > (worker in self._waiting))
                if suspicion is not None and suspicion.raised:
                    found[worker] = suspicion
        self._quiet_until = self.clock + left - TICK_S  # a tick early, however that is rounded
        return found

    def regrouped(self) -> None:
        """Notes that all have regrouped, so whoever waits now waits anew, also for the same."""
        if self._all_wait_since is not None:
            self._all_wait_since = self.clock

    @property
    def standstill_s(self) -> float:
        """The seconds for which everybody has been heard to wait, and nobody done anything else; 0 where somebody
        has.
        """
        if self._all_wait_since is None:
            return 0.0
        return self.clock - max([self._all_wait_since, *(sign.since for sign in self._signs.values())])

    def _everybody_waits(self) -> bool:
        """Whether everybody has just said so.  Costs one look at each worker while that is so."""
        return 0 < len(self._signs) == len(self._waiting) and all(
            not sign.stopped and self.clock - sign.heartbeat < FRESH_S for sign in self._signs.values()
        )

    @property
    def stall_s(self) -> float:
        """The seconds for which everybody may wait."""
        return self.deadlines.stall_s(self._step_s) if self._committed_at is not None else self.deadlines.idle_timeout_s

    @property
    def instruction_s(self) -> float:
        """The seconds for which a worker that does nothing may be at one instruction."""
        return self.deadlines.instruction_s(self._step_s)

    def _set_lease(self) -> None:
        self._lease_s = min(self.instruction_s, self.deadlines.heartbeat_timeout_s - LATE_S - TICK_S)

    def _suspicion(self, sign: Sign, others_wait: bool) -> Suspicion | None:
        """The worst suspicion of a worker, if there is any: who is silent has not said what it is at now."""
        heartbeat_s, seen = self.deadlines.heartbeat_timeout_s - TICK_S, max(sign.supervisor_heartbeat, sign.heartbeat)
        if (silent := self.clock - sign.heard) > SUSPECTED * heartbeat_s:
            return Suspicion(
                "nothing was heard of it or its supervisor",
                silent,
                max(heartbeat_s, sign.leased_until - sign.heard),
                cause=Cause.SILENT,
            )
        if sign.stopped:
            return Suspicion(
                "its process is stopped",
                self.clock - seen,
                max(self.instruction_s, sign.leased_until - seen),
                cause=Cause.STOPPED,
            )
        return self._slowness(sign, sign.last, others_wait) if sign.last is not None else None

    def _slowness(self, sign: Sign, last: Heartbeat, others_wait: bool) -> Suspicion | None:
        same = self.clock - (sign.heartbeat if last.at == WAITS else sign.since)
        if last.at == COMPUTES and self._committed_at is not None:
            work = _work(last.what)
            if 0 < work[0] <= self._committed_step:
                return None
            return Suspicion(f"it computes {last.what}", same, *self._allowance(work, sign), work)
        if not others_wait:
            return None
        what = "it says nothing" if last.at == WAITS else f"it {last.at} {last.what}"
        return Suspicion(what, same, self.deadlines.idle_timeout_s, "and others wait")

    def _allowance(self, work: Work, sign: Sign) -> tuple[float, str]:
        """The seconds that an instruction may take, and why."""
        if work in self._costly:
            return (
                self.deadlines.idle_timeout_s,
                "which has cost a worker already, so it may be the work that takes long",
            )
        share = self._cpu_share(sign)
        if share is None:
            return self.deadlines.busy_s(self._step_s), "and what its process uses of the CPU can't be read"
        known = f"its process using {share:.0%} of a core"
        return (self.deadlines.busy_s if share > BUSY else self.deadlines.instruction_s)(self._step_s), known

    def _cpu_share(self, sign: Sign) -> float | None:
        """The share of a core that a process has used since it began what it is at; None where nobody can tell."""
        if sign.cpu_s is None or sign.cpu_since_s is None:
            return None
        return (sign.cpu_s - sign.cpu_since_s) / max(self.clock - sign.since, TICK_S)


def _work(instruction: str) -> Work:
    """The work that an instruction is for: what is slow for one worker is so for another, a micro-batch of a step,
    whatever is done with it, or what a stage does at the step's end.  What is no instruction is only itself: whatever a
    worker says must not hurt the others.
    """
    try:
        one = Instruction.parse(instruction)
    except ValueError:
        return 0, instruction
    return one.step, str(one.micro_batch or one.op)
