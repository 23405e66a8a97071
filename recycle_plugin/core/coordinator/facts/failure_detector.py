"""A failure detector, as a state machine without clock or sockets: which workers are silent, stopped or stuck.

A worker's *heartbeat* comes from a thread of its own, with what the worker is at and how many instructions it has
finished. Its *supervisor heartbeat* says that the process is there, whether it is stopped, and how much CPU it has
used. To evict a healthy worker is as bad as to miss a dead one, hence:

* A worker that waits for another is not to blame, however long it waits.
* A worker that computes one instruction beyond the deadline is: an instruction computes only once its inputs are there.
  The deadline is longer if its process uses the CPU.
* If the same work has cost a worker before, the next worker gets the long deadline: the work may be what takes long.
* Whatever may take long (the script's own code, data, a checkpoint, the first step, which may compile) has the long
  deadline, which only counts while others wait.
* A process that its supervisor reports as stopped is lost after the deadline, whatever it was at. Heartbeats alone
  don't show that: a worker whose interpreter is held up, say by a large pickle, sends none and is healthy.
* If neither kind of heartbeat comes, the host is gone or cut off. That has its own deadline, which no step lengthens.
* Nobody waits for a newcomer, but its seat stays empty meanwhile. Silent or stopped ones are judged as members are. A
  script that makes no progress and waits for nobody has the long deadline. A waiting newcomer has a deadline of its
  own, ``wait_timeout_s``, after which its process ends, and so has a replay (core/coordinator/replay_deadlines.py).

The results are suspicions; core/coordinator/stalls.py decides whom to give up. The deadlines are those of
core/vocabulary/deadlines.py. Time passes by ticks, and a late tick counts little more than a punctual one: while the
coordinator itself was stopped or starved, it could hear nobody. A tick looks at all workers only if one may have become
suspect since the last look: as long as all go on, a few times per shortest deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import NamedTuple

from recycle_plugin.core.messages.activity import COMPUTES, WAITS, Activity, At
from recycle_plugin.core.messages.from_coordinator import Lease
from recycle_plugin.core.messages.from_workers import Heartbeat, SupervisorHeartbeat
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.deadlines import LATE_S, SUSPECTED, TICK_S, WORKER_BEAT_S, Deadlines, paced_s
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.roster import WorkerId

REMEMBERED = 20  # steps that count for the median
BUSY = 0.2  # of a core: a process that uses more is at work
Work = tuple[int, MicroBatch | Op | str]  # step, and what of it
UNEVEN_S = 3.0  # how long a worker done with its part of a step may wait for scripts that end in it
FRESH = 2  # times the seconds between two heartbeats: an older one does not count for now


class Suspicion(NamedTuple):
    """A worker has been at ``what`` for ``for_s`` seconds, of at most ``limit_s``. ``known``: what else is known.
    ``work``: what the instruction is for, if it computes one.
    """

    what: str
    for_s: float
    limit_s: float
    known: str = ""
    work: Work | None = None
    cause: Cause = Cause.STUCK

    @property
    def raised(self) -> bool:
        """Whether it is worth reporting: a third of the time is over."""
        return self.for_s > SUSPECTED * self.limit_s

    @property
    def overdue(self) -> bool:
        """Whether the limit is exceeded."""
        return self.for_s > self.limit_s

    def __str__(self) -> str:
        return f"{self.what} for {self.for_s:.1f} s{self.known and ', '}{self.known}"


@dataclass
class Sign:
    """The last signs of a worker, in seconds of :attr:`FailureDetector.clock`."""

    heard: float  # the last message of the worker or its supervisor
    supervisor_heartbeat: float  # its process was seen running
    heartbeat: float
    since: float  # the worker has been at the same
    leased_until: float = 0.0  # it is not given up for silence before
    stopped: bool = False
    cpu_s: float | None = None  # CPU time of its process, None if unknown
    cpu_since_s: float | None = None  # CPU time when it began what it is at
    last: Heartbeat | None = None

    def hear(self, message: Heartbeat | SupervisorHeartbeat, clock: float) -> None:
        """Record a heartbeat of the worker or of its supervisor."""
        self.heard = clock
        if isinstance(message, SupervisorHeartbeat):
            self.stopped, self.cpu_s = message.stopped, message.cpu_s
            self.supervisor_heartbeat = self.supervisor_heartbeat if message.stopped else clock
            return
        last = self.last
        if last is None or message.done != last.done or message.doing != last.doing:
            self.since, self.cpu_since_s = clock, self.cpu_s
        self.last, self.heartbeat = message, clock


@dataclass
class FailureDetector:
    """The failure detector for the workers of a job; it knows none before ``admit``."""

    deadlines: Deadlines = Deadlines()
    clock: float = 0.0
    ranks: int = 0  # at the start of the job
    _ticked: float | None = None
    _signs: dict[WorkerId, Sign] = field(default_factory=dict)
    _newcomers: dict[WorkerId, Sign] = field(default_factory=dict)
    _waiting: set[WorkerId] = field(default_factory=set)  # by their last heartbeat
    _quiet_until: float = 0.0  # until then no worker can become suspect
    _intervals: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _step_s: float = 0.0  # median of the intervals, 0 if unknown
    _lease_s: float = field(init=False)
    _fresh_s: float = field(init=False)
    _committed_at: float | None = None
    _committed_step: int = 0
    _all_wait_since: float | None = None
    _costly: set[Work] = field(default_factory=set)  # work of uncommitted steps that has cost a worker

    def __post_init__(self) -> None:
        self._set_lease()
        self._fresh_s = FRESH * paced_s(WORKER_BEAT_S, self.ranks, self.deadlines)

    def admit(self, workers: Iterable[WorkerId]) -> None:
        """Begin to observe ``workers``."""
        for worker in workers:
            self.observe(worker)

    def observe(self, worker: WorkerId) -> None:
        """Begin to observe one more worker."""
        self._signs[worker] = self._sign()
        self._waiting.discard(worker)
        self._quiet_until = 0.0

    def dismiss(self, worker: WorkerId) -> None:
        """Stop observing ``worker``."""
        self._signs.pop(worker, None)
        self._waiting.discard(worker)

    def supervisor_heartbeat(self, message: SupervisorHeartbeat) -> None:
        sign = self._signs.get(message.worker)
        if sign is not None:
            sign.hear(message, self.clock)

    def heartbeat(self, message: Heartbeat) -> Lease:
        """Record a worker's heartbeat; return the answer, with a lease of 0 s for a worker that is not observed. The
        lease holds even if the deadline shrinks later, or if this clock lags, which only moves at ticks.
        """
        sign = self._signs.get(message.worker)
        if sign is None:
            return Lease(message.number, 0.0)
        sign.hear(message, self.clock)
        sign.leased_until = self.clock + LATE_S + self._lease_s
        (self._waiting.add if message.doing.at == WAITS else self._waiting.discard)(message.worker)
        return Lease(message.number, self._lease_s)

    def newcomer_heartbeat(self, message: Heartbeat | SupervisorHeartbeat) -> None:
        """Record a heartbeat of a newcomer, or of its supervisor."""
        self._newcomers.setdefault(message.worker, self._sign()).hear(message, self.clock)

    def late_newcomers(
        self, newcomers: Collection[WorkerId], ready: Iterable[WorkerId], replaying: Collection[WorkerId]
    ) -> Iterator[tuple[WorkerId, Suspicion]]:
        """Yield ``newcomers`` past a deadline, once each. ``ready``: those whose engines stand, of which something has
        to be heard; ``replaying``: those that do or help a replay.
        """
        for worker in ready:
            self._newcomers.setdefault(worker, self._sign())
        self._newcomers = {worker: sign for worker, sign in self._newcomers.items() if worker in newcomers}
        for worker, sign in list(self._newcomers.items()):
            found = self._absence(sign)
            if found is None and sign.last is not None and sign.last.doing.at != WAITS and worker not in replaying:
                idle_s = self.deadlines.idle_timeout_s
                found = Suspicion("its script has made no progress", self.clock - sign.since, idle_s)
            if found is not None and found.overdue:
                del self._newcomers[worker]
                yield worker, found

    def _sign(self) -> Sign:
        return Sign(self.clock, self.clock, self.clock, self.clock)

    def ran(self, worker: WorkerId) -> None:
        """Record that ``worker`` has sent what no stopped process can: it may have run between two stops."""
        sign = self._signs.get(worker)
        if sign is not None:
            sign.heard = sign.supervisor_heartbeat = self.clock

    def last(self, worker: WorkerId) -> Heartbeat | None:
        """Return the last heartbeat of ``worker``, None if there is none."""
        sign = self._signs.get(worker)
        return sign.last if sign is not None else None

    def doing(self, worker: WorkerId) -> tuple[Activity, float]:
        """Return what ``worker`` is at, which may be that it is stopped or silent, and for how many seconds."""
        sign = self._signs[worker]
        if sign.stopped:
            return Activity(At.STOPPED), self.clock - max(sign.supervisor_heartbeat, sign.heartbeat)
        if sign.last is None or self.clock - sign.heartbeat >= self._fresh_s:
            return Activity(At.SILENT), self.clock - sign.heartbeat
        return sign.last.doing, self.clock - sign.since

    def waits_in_vain(self, worker: WorkerId) -> bool:
        """Return whether ``worker`` waits, and for longer than for a script that ends in the same step."""
        doing, for_s = self.doing(worker)
        return doing.at == WAITS and for_s > UNEVEN_S

    def committed(self, step: int, now: float) -> None:
        """Record that steps up to ``step`` are committed at ``now`` (seconds): no worker is at one of them any more."""
        if self._committed_at is not None:
            self._intervals.append(now - self._committed_at)
            self._step_s = median(self._intervals)
            self._set_lease()
        self._committed_at = now
        self._committed_step = step
        self._costly = {work for work in self._costly if work[0] > step}

    def rewind(self, step: int) -> None:
        """Go on from ``step``, a checkpoint's, in place of the last committed one."""
        self._committed_step = step

    def has_cost(self, work: Work | None) -> None:
        """Record that ``work`` has cost a worker, which gives it the long deadline."""
        if work is not None:
            self._costly.add(work)

    def tick(self, now: float) -> dict[WorkerId, Suspicion]:
        """Move the clock to ``now`` (seconds); return the suspicions that are worth reporting, by worker."""
        if self._ticked is not None:
            self.clock += min(max(now - self._ticked, 0.0), LATE_S)
        self._ticked = now
        if not self._everybody_waits():
            self._all_wait_since = None
        elif self._all_wait_since is None:
            self._all_wait_since = self.clock
        return self._suspicions() if self.clock >= self._quiet_until else {}

    def _suspicions(self) -> dict[WorkerId, Suspicion]:
        """Return the suspicions that are worth reporting. Each worker is looked at once, and again only if it may be
        suspect: by every rule, a worker that was heard and has got on within the shortest deadline is not.
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
        self._quiet_until = self.clock + left - TICK_S  # a tick early, against rounding
        return found

    def regrouped(self) -> None:
        """Record that all have regrouped: whoever waits now waits anew, even for the same thing."""
        if self._all_wait_since is not None:
            self._all_wait_since = self.clock

    @property
    def standstill_s(self) -> float:
        """For how many seconds all workers have been heard to wait, and none has got on; 0 if one does not wait."""
        if self._all_wait_since is None:
            return 0.0
        return self.clock - max([self._all_wait_since, *(sign.since for sign in self._signs.values())])

    def _everybody_waits(self) -> bool:
        """Return whether every worker has just reported that it waits. Looks at each worker while that is so."""
        return 0 < len(self._signs) == len(self._waiting) and all(
            not sign.stopped and self.clock - sign.heartbeat < self._fresh_s for sign in self._signs.values()
        )

    @property
    def stall_s(self) -> float:
        """For how many seconds all workers may wait."""
        return self.deadlines.stall_s(self._step_s) if self._committed_at is not None else self.deadlines.idle_timeout_s

    @property
    def instruction_s(self) -> float:
        """For how many seconds a worker whose process uses no CPU may be at one instruction."""
        return self.deadlines.instruction_s(self._step_s)

    def _set_lease(self) -> None:
        self._lease_s = min(self.instruction_s, self.deadlines.heartbeat_timeout_s - LATE_S - TICK_S)

    def _suspicion(self, sign: Sign, others_wait: bool) -> Suspicion | None:
        """Return the gravest suspicion of a worker, if any. What a silent worker was at no longer counts."""
        absence = self._absence(sign)
        return self._slowness(sign, sign.last.doing, others_wait) if absence is None and sign.last else absence

    def _absence(self, sign: Sign) -> Suspicion | None:
        """Return the suspicion that a worker is silent or stopped, if there is one."""
        heartbeat_s, seen = self.deadlines.heartbeat_timeout_s - TICK_S, max(sign.supervisor_heartbeat, sign.heartbeat)
        if (silent := self.clock - sign.heard) > SUSPECTED * heartbeat_s:
            return Suspicion(
                "nothing was heard from it or its supervisor",
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
        return None

    def _slowness(self, sign: Sign, doing: Activity, others_wait: bool) -> Suspicion | None:
        same = self.clock - (sign.heartbeat if doing.at == WAITS else sign.since)
        if doing.at == COMPUTES and self._committed_at is not None:
            work = _work(doing.what)
            if 0 < work[0] <= self._committed_step:
                return None
            return Suspicion(f"it computes {doing}", same, *self._allowance(work, sign), work)
        if not others_wait:
            return None
        what = "it says nothing" if doing.at == WAITS else f"it {doing.at} {doing}"
        return Suspicion(what, same, self.deadlines.idle_timeout_s, "and others wait")

    def _allowance(self, work: Work, sign: Sign) -> tuple[float, str]:
        """Return how many seconds an instruction may take, and why."""
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
        """Return the share of a core that a process has used since it began what it is at; None if unknown."""
        if sign.cpu_s is None or sign.cpu_since_s is None:
            return None
        return (sign.cpu_s - sign.cpu_since_s) / max(self.clock - sign.since, TICK_S)


def _work(what: str | Instruction) -> Work:
    """Return the work that an instruction is for: a micro-batch of a step, whatever is done with it, or an operation at
    a step's end. If one worker is slow at it, so are others. Words count only as themselves: what a confused worker
    says must not hurt others.
    """
    return (0, what) if isinstance(what, str) else (what.step, what.micro_batch or what.op)
