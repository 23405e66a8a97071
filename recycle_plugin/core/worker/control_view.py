"""The worker's view of the control plane: the coordinator's messages, and what follows from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from recycle_plugin.core.messages.contributions import EACH, LOSS, MEAN
from recycle_plugin.core.messages.from_coordinator import (
    BarrierPassed,
    Beside,
    Collected,
    Committed,
    End,
    Expected,
    Generation,
    HashAfter,
    LogOnly,
    MayGo,
    Recorded,
    Replay,
    Resume,
    Serve,
)
from recycle_plugin.core.messages.from_workers import Durable, Replaying, Serving
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.commit_rule import is_reached
from recycle_plugin.core.vocabulary.describe import COORDINATOR_GONE, named
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId
from recycle_plugin.core.worker.executor import Interrupted

UNREAD = 64  # commits that nobody has asked about


class JobEnded(BaseException):
    """The coordinator has ended the job: leave the training script now. ``code``: the exit code of the process. No
    Exception: a user's own ``except Exception`` must not swallow it.
    """

    def __init__(self, reason: str, failed: bool, code: int = 0) -> None:
        super().__init__(reason)
        self.failed = failed
        self.code = int(failed) or code


class ControlView:
    """The view of the worker of ``rank`` on the job; ``incarnation``: which process of its rank it is.

    Membership: ``generation`` is the one in force (None before the start), ``pending`` a newer one that is not adopted,
    ``adopting`` the context for adopting it. ``since``: the last committed step when ``generation`` came in force;
    ``changed_behind``: when the members last changed; ``interrupted_behind``: when a loss was last heard of.
    ``departed``: the others go on without this worker, since it was to leave. ``shard``: its shard of its seat.

    Steps: ``committed``, ``begun`` and ``evaluated`` are the last step known to be committed, the last that this worker
    has begun, and the last evaluation known to be over. ``news``: commits not yet taken. ``end``: the job's.
    ``may_go``: the script is through, and nobody needs this worker. ``serves``, ``hashes``: see :meth:`take_serves` and
    :meth:`take_hashes`.

    Logs: ``durable`` is the step of the last checkpoint that logs reach back to, ``logged`` the boundaries to log (None
    while unknown). ``replayed``: how many messages have come of stages that are being replayed; ``expected``: what
    comes next; ``replay``: what this worker is to replay; ``beside``: newcomers of its stage that wait for that.

    Of a ``newcomer``, which has come back to a started job: ``recorded`` is what its script was told, ``called_off``
    the last generation that held at once without it, ``heard_in`` the last that it is in, ``reported_first`` the first
    that it has reported for since.
    """

    def __init__(self, rank: int, incarnation: int = 0) -> None:
        self.rank, self.incarnation, self.shard = rank, incarnation, 0
        self.generation: Generation | None = None
        self.pending: Generation | None = None
        self.committed = self.begun = self.durable = self.evaluated = 0
        self.adopting: Callable[[], AbstractContextManager[object]] = nullcontext
        self.logged: frozenset[int] | None = None
        self.since = self.changed_behind = self.interrupted_behind = 0
        self.news: deque[tuple[Generation | None, Committed]] = deque(maxlen=UNREAD)
        self.recorded: list[Recorded] = []
        self.end: End | None = None
        self.departed = self.may_go = False
        self.called_off = -1
        self.reported_first: int | None = None
        self.heard_in: Generation | None = None
        self.newcomer = incarnation > 0  # it has come back to a started job
        self.present = False  # a newcomer knows where the job is
        self.asks_in = False  # a newcomer has reported that it has the state: from then on others may count on it
        self._unfilled: tuple[int, ...] = ()  # the steps before which data had ended, one for each time
        self._ends_heard = 0  # how many of these a newcomer's script has heard
        self.place: Place | None = None  # where the plain iterator of a newcomer's replica stands, if known
        self._sources: list[Serving] = []
        self.serves: list[Serve] = []
        self.hashes: set[int] = set()  # the steps after which the state is to be hashed
        self.replay: Replay | None = None
        self.beside: tuple[Member, ...] = ()
        self.others: Roster | None = None  # of a newcomer: the last roster heard of without it
        self.replayed = 0
        self.expected = Expected("", 0.0)
        self._leaves_at = 0  # the step before which this worker is to leave, if it is
        self._newest = self._resumed = -1  # the newest generation heard of, and the newest resumed
        self._next: Generation | None = None  # a planned generation that came before ``pending`` was adopted
        self._resume: Resume | None = None
        self._collected: dict[tuple[int, str], dict[str, Any]] = {}
        self._barriers_passed: dict[Barrier, BarrierPassed] = {}

    @property
    def worker(self) -> WorkerId:
        return WorkerId(self.rank, self.incarnation)

    def __str__(self) -> str:
        return str(self.member or named(self.rank))

    @property
    def member(self) -> Member | None:
        """This worker as a member of the generation in force; None if it is none."""
        return self.roster.member(self.worker)

    @property
    def outside(self) -> bool:
        """Whether this worker is a newcomer that is no member yet."""
        return self.newcomer and self.generation is None

    @property
    def is_first(self) -> bool:
        """Whether this worker acts for all. Before the start rank 0 does, and a newcomer only once it is a member."""
        if self.generation is None:
            return self.rank == 0 and not self.newcomer
        return self.worker == self.roster.first.worker

    @property
    def roster(self) -> Roster:
        """The members of the generation in force; empty before the start."""
        return self.generation.roster if self.generation else Roster()

    @property
    def number(self) -> int:
        """The number of the generation in force; 0 before the start, when all are members."""
        return self.generation.number if self.generation else 0

    def take(self, message: object) -> None:
        """Record one message of the coordinator, unless it is old: of a past membership, or heard before."""
        if self._is_old(message):
            return
        match message:
            case Generation():
                self._take_generation(message)
            case Resume():
                self._take_resume(message)
            case Committed():
                if self.outside:
                    return  # Recorded tells it of steps that it has no part in
                self.committed = max(self.committed, message.step)
                self.news.append((self.generation, message))
                # others may commit later steps while a leaving worker is still at its last
                self._forget_before(min(message.step, self._leaves_at - 1) if self._leaves_at else message.step)
            case Collected():
                self._collected[message.step, message.name] = message.values
            case Recorded():
                self.recorded.append(message)
                self.committed, self.present = max(self.committed, message.committed), True
                self._forget_before(message.committed)
                self.evaluated = max(self.evaluated, message.evaluation + len(message.evaluations) - 1)
                self.place, self._unfilled = message.place, message.unfilled
            case BarrierPassed():
                if not self.outside:  # else it is the members', and another one may have the same name later
                    self._barriers_passed[message.barrier] = message
                if message.barrier.meets is Meets.EVALUATED:
                    self.evaluated = max(self.evaluated, message.barrier.number)
            case Serving():
                self._sources.append(message)
            case Serve():
                self.serves.append(message)
            case HashAfter():
                self.hashes.add(message.step)
            case Durable():
                self.durable = max(self.durable, message.step)
            case LogOnly():
                self.logged = frozenset(message.boundaries)
            case Replay():
                self.replay = message
            case Beside():
                self.beside = message.members
            case Replaying():
                self.replayed += 1
            case Expected():
                self.expected = message
                self.replayed += 1
            case End():
                self.end = message
            case MayGo():
                self.may_go = True

    def _take_generation(self, message: Generation) -> None:
        member = self.worker in message.roster.workers
        if self.outside and not member:  # the others go on, and have not waited for this worker
            self.pending = self._next = None
            self.called_off = self.called_off if message.from_step else message.number
            self.others = message.roster
            return
        self.departed = not member and (self.departed or self.has_left(message))
        self.heard_in = message if member else self.heard_in
        if message.from_step or member:
            self._leaves_at = 0 if member else message.from_step
        if message.from_step and self._is_certain(self.pending):
            self._next = message  # the pending one is adopted first: its Resume may have come with this
        else:
            self.pending, self._next, self._resume = message, None, None
            if not message.from_step:
                self.interrupted_behind = self.committed

    def _take_resume(self, message: Resume) -> None:
        self._resume = message
        if message.rejected:
            self._forget_from(message.committed + 2)
        if message.batches is not None and message.batches.void:
            self._forget_from(message.batches.void)

    def _forget_from(self, step: int) -> None:
        self._collected = {key: values for key, values in self._collected.items() if key[0] < step}

    def _forget_before(self, step: int) -> None:
        self._collected = {key: values for key, values in self._collected.items() if key[0] >= step}

    def _is_old(self, message: object) -> bool:
        """Return whether ``message`` is a Generation or Resume no newer than the newest heard, or a known commit."""
        match message:
            case Generation():
                old, self._newest = message.number <= self._newest, max(message.number, self._newest)
                return old
            case Resume():
                old, self._resumed = message.generation <= self._resumed, max(message.generation, self._resumed)
                return old
            case Committed():
                return message.step <= self.committed and not self.outside
        return False

    def hears_end(self, step: int) -> bool:
        """Return whether a newcomer's script is to hear, once each time, that the data had ended before ``step``."""
        heard = self._ends_heard
        self._ends_heard += heard < len(self._unfilled) and self._unfilled[heard] == step
        return self._ends_heard > heard

    def has_left(self, generation: Generation) -> bool:
        """Return whether ``generation``, which holds at once, lacks this worker because its planned leave has come."""
        outside = self.worker not in generation.roster.workers and not generation.from_step
        return outside and self._leaves_at > 0 and self.committed >= self._leaves_at - 1

    def lose_coordinator(self, why: str = COORDINATOR_GONE) -> bool:
        """Take the job for over, also if it had a planned end: the coordinator is gone. Return whether that is news."""
        lost = self.end is None or not self.end.failed
        if lost:
            self.end = End(0, why, failed=True)
        return lost

    def rewind(self, step: int) -> None:
        """Set the last committed step to ``step``, whose state all workers have loaded from a checkpoint."""
        self.committed = self.begun = step
        self._collected.clear()

    def _is_certain(self, pending: Generation | None) -> bool:
        """Return whether all adopt ``pending`` if nothing fails: it holds at once, or all have come to its step."""
        return pending is not None and (
            not pending.from_step or (self._resume is not None and self._resume.generation == pending.number)
        )

    def interruption(self) -> Generation | None:
        """Return a membership change that holds at once, if there is one."""
        pending = self.pending
        return pending if pending is not None and not pending.from_step else None

    def check_end(self) -> None:
        """Raise :class:`JobEnded` if the job is over."""
        if self.end is not None and not self.end.step:
            raise JobEnded(self.end.reason, self.end.failed)

    def check(self) -> None:
        """Raise :class:`Interrupted` if the membership has changed, or :class:`JobEnded` if the job is over."""
        if self.end is None and self.pending is None:
            return
        self.check_end()
        change = self.interruption()
        if change is not None:
            raise Interrupted(f"generation {change.number}: {change.cause}")

    def take_sources(self) -> list[Serving]:
        """Take out the Serving messages for this newcomer that were not taken before."""
        found, self._sources = self._sources, []
        return found

    def take_serves(self) -> list[Serve]:
        """Take out the newcomers to serve that were not taken before."""
        found, self.serves = self.serves, []
        return found

    def take_hashes(self) -> set[int]:
        """Take out the steps after which the state is to be hashed that were not taken before."""
        found, self.hashes = self.hashes, set()
        return found

    def take_news(self) -> Iterator[tuple[Generation | None, Committed]]:
        """Take out the commits that were not taken before, each with the generation in which it was heard."""
        while self.news:
            yield self.news.popleft()

    def take_replay(self) -> Replay | None:
        """Return the replay for this worker, once; None if there is no new one."""
        found, self.replay = self.replay, None
        return found

    def take_recorded(self) -> Iterator[Recorded]:
        """Yield the records for a newcomer's script that were not taken before."""
        while self.recorded:
            yield self.recorded.pop(0)

    def is_committed(self, step: int) -> bool | None:
        """Return True if ``step`` is known to be committed, else None."""
        return True if self.committed >= step else None

    def may_come(self, step: int) -> bool:
        """Return whether a peer may still send data of ``step`` (negative: an evaluation), as far as is known here."""
        return is_reached(step, self.committed, self.evaluated)

    def collected(self, step: int, name: str) -> dict[str, Any] | None:
        """Return the complete contributions ``name`` of ``step``, which stay until a later step is committed."""
        return self._collected.get((step, name))

    def loss(self, step: int) -> float | None:
        """Return the mean loss of ``step``; None while it is not complete."""
        told = self.collected(step, LOSS)
        return None if told is None else told[MEAN]

    def losses(self, step: int) -> dict[str, Loss]:
        """Return the loss of each micro-batch of ``step``, whose mean is known. {} except on the last stage, and if a
        framework logs nothing else of them.
        """
        return self.collected(step, EACH) or {}

    def barrier_passed(self, barrier: Barrier, number: int) -> BarrierPassed | bool | None:
        """Hand out, once, the passing of ``barrier``, which this worker reached in generation ``number``; False
        if the membership changed first, None while neither is known.
        """
        return self._barriers_passed.pop(
            barrier, False if self.number != number or self.interruption() is not None else None
        )

    def resume_of(self, generation: Generation) -> Resume | bool | None:
        """Return the Resume of ``generation``; False if a newer one has replaced it, None while neither is known."""
        if self.pending is not generation:
            return False
        return self._resume if self._resume and self._resume.generation == generation.number else None

    def adopt(self, generation: Generation) -> None:
        """Make ``generation`` the membership in force."""
        with self.adopting():
            before, self.generation, self.replay = self.roster.workers, generation, None
            self.since = self._resume.committed if self._resume is not None else 0
            if self.roster.workers != before:
                self.changed_behind = self.since
            if self.pending is generation:
                self.pending, self._next = self._next, None


class ControlPort(Protocol):
    """The part of a worker's machine that all others use: the view of the control plane, and the connection to it."""

    @property
    def control_view(self) -> ControlView:
        """The worker's view of the control plane."""

    def send(self, message: object) -> None:
        """Send ``message`` to the coordinator."""
