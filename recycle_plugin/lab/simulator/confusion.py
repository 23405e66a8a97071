"""Confused workers in a simulated cluster: beside what they have to say, they say what is a valid message, and wrong.

Their words are old or said again, of another worker or process, of generations, steps, seats and micro-batches that
there are not, and out of turn; a confused worker also hears the coordinator's old words again.  What must hold whatever
they say (core/coordinator/confused.py): a confused worker costs itself alone.  Not among these words are those that are
believed there, since nobody else knows better: its own numbers, that it has applied the step that is next, that its log
lacks something, and the end of the job.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from random import Random
from typing import Any

from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.contributions import LOSS, NORM
from recycle_plugin.core.messages.from_coordinator import Collected, Committed, Generation, Resume
from recycle_plugin.core.messages.from_workers import (
    Accompanied,
    BarrierReached,
    CatchUp,
    CaughtUp,
    CheckpointLoaded,
    ComputeTime,
    Contribution,
    Durable,
    Exited,
    Fatal,
    Fingerprint,
    Heartbeat,
    Leaving,
    Left,
    Logged,
    LogsServed,
    Missing,
    OutOfData,
    Ready,
    Replaying,
    Resized,
    Serving,
    StateHash,
    Stepped,
    SupervisorHeartbeat,
    SurvivorReport,
    Terminate,
    Through,
    Unguarded,
    Unreplayable,
)
from recycle_plugin.core.messages.of_worker import OfWorker
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.roster import WorkerId

REMEMBERED = 40  # words of each
WORDS = 0.5  # of what a confused worker says, the share beside which it says something wrong
LATE_US = 300_000  # by so much at most that is said later
FAR = (0, 1, 7, 10**6)
NOWHERE = WorkerId(99, 3)
Word = tuple[bool, object]  # whether it is said on its supervisor's connection
FINAL = (Fatal, Leaving, Left, Through, Unreplayable)  # of these the first one counts


class Confusion:
    """The confused workers of one cluster, by rank, and what they have said and heard; ``seed`` draws their words."""

    def __init__(self, seed: int) -> None:
        self._random = Random(f"confusion in {seed}")
        self._until: dict[int, int] = {}
        self._said: dict[int, deque[object]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._ready: dict[WorkerId, tuple[Ready]] = {}  # with what each has asked to take part
        self._heard: dict[int, deque[object]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self.words = 0  # that were wrong

    def __bool__(self) -> bool:
        return bool(self._until)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks whose workers are, or were, confused."""
        return frozenset(self._until)

    def begin(self, rank: int, until_us: int) -> None:
        """Confuses the worker of ``rank``."""
        self._until[rank] = until_us

    def beside(self, worker: WorkerId, message: object, membership: Membership, now_us: int) -> Iterator[Word]:
        """The wrong words, mostly none, that ``worker`` says beside ``message``."""
        self._said[worker.rank].append(message)
        if isinstance(message, Ready):
            self._ready[worker] = (message,)
        if now_us < self._until.get(worker.rank, -1) and self._random.random() < WORDS:
            word = self._random.choice(KINDS)(self, worker, membership)
            if word is not None:
                self.words += 1
                yield word

    def again(self, rank: int, message: object, now_us: int) -> list[object]:
        """The coordinator's old words, mostly none, that the worker of ``rank`` hears behind ``message``."""
        heard = self._heard[rank]
        if isinstance(message, Generation | Resume | Committed | Collected):
            heard.append(message)
        if now_us >= self._until.get(rank, -1) or len(heard) < 3 or self._random.random() >= WORDS:
            return []
        self.words += 1
        return [self._random.choice(list(heard)[:-1])]

    def delay(self) -> int:
        """Microseconds by which a wrong word comes later than the right one beside it."""
        return self._random.choice((0, 0, self._random.randrange(LATE_US)))

    # --- words: each is (on the supervisor's connection, message), or None where there is nothing of that kind -------

    def _once_more(self, worker: WorkerId, membership: Membership) -> Word | None:
        said = [each for each in self._said[worker.rank] if not isinstance(each, FINAL)]
        return (False, self._random.choice(said)) if said else None

    def _of_others(self, worker: WorkerId, membership: Membership) -> Word | None:
        said = [each for rank, words in sorted(self._said.items()) if rank != worker.rank for each in words]
        return (False, self._random.choice(said)) if said else None

    def _as_another_process(self, worker: WorkerId, membership: Membership) -> Word | None:
        said = [each for each in self._said[worker.rank] if isinstance(each, OfWorker)]
        if not said:
            return None
        incarnation = worker.incarnation + self._random.choice((-1, 1, 100))
        return False, replace(self._random.choice(said), incarnation=incarnation)

    def _of_another_generation(self, worker: WorkerId, membership: Membership) -> Word | None:
        said = [each for words in self._said.values() for each in words if _has(each, "generation")]
        newest, far = membership.generation, self._random.choice(FAR)
        number = newest + 1 + far if self._random.random() < 0.5 else max(-1, newest - 1 - far)
        made: list[Any] = [
            OutOfData(worker.rank, number, membership.committed + 1),
            CheckpointLoaded(worker.rank, number),
            Missing(worker.rank, number, "what nobody sends", "0.0"),
            BarrierReached(worker.rank, number, "nowhere", {"0": 0}),
            SurvivorReport(worker.rank, number, membership.committed, "another plan"),
            Stepped(worker.rank, number, membership.committed),
            *(self._random.sample(said, 1) if said else ()),
        ]
        word = self._random.choice(made)
        if isinstance(word, Stepped) and number <= newest:
            word = replace(word, step=membership.committed)
        return False, replace(word, rank=worker.rank, incarnation=worker.incarnation, generation=number)

    def _of_a_step_to_come(self, worker: WorkerId, membership: Membership) -> Word | None:
        rank, step = worker.rank, unstarted(membership.committed) + self._random.choice(FAR)
        return self._own(
            worker,
            Stepped(rank, membership.generation, step),
            Contribution(rank, step, LOSS, {"0.0": 1.0}, 1),
            Contribution(rank, step, NORM, {"0": 1.0}, 1),
            OutOfData(rank, membership.generation, step),
            ComputeTime(rank, step, 1, 1),
            Fingerprint(rank, step, "of a step to come"),
            StateHash(rank, step, "of a step to come"),
            Logged(rank, step),
            Durable(rank, step, "nowhere"),
            Heartbeat(rank, 0, 0, "waits", "nothing", step),
        )

    def _of_a_step_that_is_over(self, worker: WorkerId, membership: Membership) -> Word | None:
        rank, step = worker.rank, max(0, membership.committed - self._random.choice(FAR))
        return self._own(
            worker,
            Stepped(rank, membership.generation, step),
            Contribution(rank, step, LOSS, {"0.0": -1.0}, 1),
            Contribution(rank, step, NORM, {"0": -1.0}, 1),
            ComputeTime(rank, step, 1, 1),
            StateHash(rank, step, "of a step that is over"),
        )

    def _of_nobody(self, worker: WorkerId, membership: Membership) -> Word | None:
        rank, step, now = worker.rank, membership.committed + 1, membership.generation
        return self._own(
            worker,
            Contribution(rank, step, LOSS, {"99.0": 1.0}, 1),
            Contribution(rank, step, NORM, {"99": 1.0}, 1),
            Contribution(rank, step, "nothing", {}, 0),
            Missing(rank, now, "what nobody sends", "99.99"),
            Missing(rank, now, f"collective {self._random.randrange(1000)}", ""),
            BarrierReached(rank, now, f"barrier {self._random.randrange(1000)}", {}),
            Serving(rank, NOWHERE, "nowhere"),
            Resized(rank, now, 0, 0, 0),
            Durable(rank, membership.committed, "nowhere", boundaries=(99,)),
            SurvivorReport(rank, now, membership.committed, "a plan", {"wgrad ?": "no name"}),
        )

    def _out_of_turn(self, worker: WorkerId, membership: Membership) -> Word | None:
        rank, committed, replays = worker.rank, membership.committed, membership.course.logs.companions.values()
        if membership.roster.member(worker) is None:
            return self._own(worker, SurvivorReport(rank, membership.generation, 0, "another plan"))
        if worker in replays:  # it may be its turn
            return None
        return self._own(
            worker,
            CatchUp(rank),
            CaughtUp(rank, committed, 0, 0),
            Replaying(rank, committed),
            Accompanied(rank, committed),
            StateHash(rank, committed, "that nobody has asked for"),
            CheckpointLoaded(rank, membership.generation),
            *self._ready.get(worker, ()),
        )

    def _of_the_supervisor(self, worker: WorkerId, membership: Membership) -> Word | None:
        rank, later = worker.rank, worker.incarnation + self._random.choice((2, 50))
        other = self._random.choice(sorted({member.rank for member in membership.roster} - {rank}) or [NOWHERE.rank])
        return True, self._random.choice(
            (
                Exited(other, -9, 0.0),
                Unguarded(other, 1),
                SupervisorHeartbeat(other, True),
                Terminate(other, "SIGTERM", "nowhere"),
                LogsServed(other, "nobody's", "nowhere"),
                LogsServed(rank, "nobody's", "nowhere"),
                Exited(rank, 0, 0.0, incarnation=later),
                Unguarded(rank, 1, incarnation=later),
                SupervisorHeartbeat(rank, True, incarnation=later),
            )
        )

    def _own(self, worker: WorkerId, *made: Any) -> Word:
        word = self._random.choice(made)
        return False, replace(word, incarnation=worker.incarnation) if isinstance(word, OfWorker) else word


def _has(message: Any, name: str) -> bool:
    return isinstance(message, OfWorker) and name in {each.name for each in fields(message)}


KINDS: tuple[Callable[[Confusion, WorkerId, Membership], Word | None], ...] = (
    Confusion._once_more,
    Confusion._of_others,
    Confusion._as_another_process,
    Confusion._of_another_generation,
    Confusion._of_a_step_to_come,
    Confusion._of_a_step_that_is_over,
    Confusion._of_nobody,
    Confusion._out_of_turn,
    Confusion._of_the_supervisor,
)
