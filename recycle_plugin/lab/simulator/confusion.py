"""Confused workers in a simulated cluster: beside their messages they send valid but wrong ones.

A wrong message is an earlier one repeated, perhaps as another worker or process, or of another generation or step. A
confused worker also hears old messages of the coordinator again. Whatever it says, it must cost itself alone
(core/coordinator/words.py). Left out are messages that are believed, since nobody else knows better: its own numbers,
that it has applied the next step, that its log lacks something, and the end of the job. tests/pure/test_confused.py has
messages with any values of their types.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.from_coordinator import Collected, Committed, Generation, Resume
from recycle_plugin.core.messages.from_workers import (
    Contribution,
    Crashed,
    Durable,
    Exited,
    Fatal,
    Fingerprint,
    Heartbeat,
    Leaving,
    Left,
    LogBroken,
    Logged,
    Ready,
    StateHash,
    Stepped,
    SurvivorReport,
    Terminate,
    Through,
    Unreplayable,
    Vanishing,
)
from recycle_plugin.core.messages.said import WORKER, OfWorker
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.lab.simulator.drawn_troubles import CALM_US
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Scenario, Trouble

REMEMBERED = 40  # messages of each worker
WORDS = 0.5  # share of a confused worker's messages that come with a wrong one
LATE_US = 300_000  # the most by which a wrong message is delayed
FAR = (0, 1, 7, 10**6)
BELIEVED = (Crashed, Fatal, Leaving, Left, LogBroken, Terminate, Through, Unreplayable, Vanishing)
OF_A_STEP = (Durable, Fingerprint, Heartbeat, Logged, StateHash)  # in addition to those that declare AHEAD
OVER = (Contribution, StateHash, Stepped)  # messages that may also be of a past step
Word = tuple[str, object]  # (connection, message)


class Confusion:
    """The confused workers of one cluster, by rank, and what was said and heard. ``seed`` draws their messages."""

    def __init__(self, seed: int) -> None:
        self._random = Random(f"confusion in {seed}")
        self._until: dict[int, int] = {}
        self._said: dict[int, deque[Any]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._ready: dict[WorkerId, tuple[Ready]] = {}  # each worker's request to take part
        self._heard: dict[int, deque[object]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self.words = 0  # count of wrong messages

    def __bool__(self) -> bool:
        return bool(self._until)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks whose workers are, or were, confused."""
        return frozenset(self._until)

    def begin(self, rank: int, until_us: int) -> None:
        """Confuse the worker of ``rank``."""
        self._until[rank] = until_us

    def beside(self, worker: WorkerId, message: object, membership: Membership, now_us: int) -> Iterator[Word]:
        """Yield the wrong messages, mostly none, that ``worker`` sends beside ``message``, each with its connection."""
        if not isinstance(message, BELIEVED):
            self._said[worker.rank].append(message)
        if isinstance(message, Ready):
            self._ready[worker] = (message,)
        if now_us < self._until.get(worker.rank, -1) and self._random.random() < WORDS:
            word = self._wrong(worker, membership)
            if word is not None:
                self.words += 1
                yield getattr(word, "BY", WORKER), word

    def again(self, rank: int, message: object, now_us: int) -> list[object]:
        """Return the old messages, mostly none, that the worker of ``rank`` hears again after ``message``."""
        heard = self._heard[rank]
        if isinstance(message, Generation | Resume | Committed | Collected):
            heard.append(message)
        if now_us >= self._until.get(rank, -1) or len(heard) < 3 or self._random.random() >= WORDS:
            return []
        self.words += 1
        return [self._random.choice(list(heard)[:-1])]

    def delay(self) -> int:
        """Return by how many microseconds a wrong message comes after the right one."""
        return self._random.choice((0, 0, self._random.randrange(LATE_US)))

    # --- wrong words: None where there is nothing of that kind --------------------------------------

    def _wrong(self, worker: WorkerId, membership: Membership) -> object | None:
        """Return a wrong message; None if nothing was said yet that could be one."""
        own = [*self._said[worker.rank], *self._ready.get(worker, ())]
        of_worker = [each for each in own if isinstance(each, OfWorker)]
        match self._random.choice(
            ("again", "another's", "its death", "another process's", "anew", *2 * ("when", "step"))
        ):
            case "again":
                return self._one_of(own)
            case "another's":
                return self._one_of(
                    [each for rank in sorted(self._said.keys() - {worker.rank}) for each in self._said[rank]]
                )
            case "its death":
                other = self._one_of([each for each in membership.roster if each.rank != worker.rank])
                return other and Exited(other.rank, -9, 0.0, incarnation=other.incarnation)
            case "another process's":
                word, number = self._one_of(of_worker), worker.incarnation + self._random.choice((-1, 2, 100))
                return word and replace(word, incarnation=number)
            case "anew":
                word = self._one_of([each for each in of_worker if _is_over(each, worker, membership)])
                return word and replace(word, incarnation=worker.incarnation)
            case "when":
                word = self._one_of([each for each in of_worker if hasattr(each, "generation")])
                return word and self._of_another_generation(word, worker, membership)
            case _:
                word = self._one_of([each for each in of_worker if each.AHEAD or isinstance(each, OF_A_STEP)])
                return word and self._of_another_step(word, worker, membership)

    def _one_of(self, words: Sequence[Any]) -> Any:
        return self._random.choice(words) if words else None

    def _of_another_generation(self, word: Any, worker: WorkerId, membership: Membership) -> object:
        newest, far = membership.generation, self._random.choice(FAR)
        number = newest + 1 + far if self._random.random() < 0.5 else max(-1, newest - 1 - far)
        if isinstance(word, SurvivorReport) and membership.roster.member(worker) is None:
            number = self._random.choice((number, newest))
        over = {"step": membership.committed} if hasattr(word, "step") else {}
        return replace(word, generation=number, incarnation=worker.incarnation, **over)

    def _of_another_step(self, word: Any, worker: WorkerId, membership: Membership) -> object:
        committed, far = membership.committed, self._random.choice(FAR)
        is_over = isinstance(word, OVER) and self._random.random() < 0.5
        # even if late, no step that the worker may rightly speak of
        if isinstance(word, Contribution | Stepped):
            far = far if is_over else FAR[-1]
        elif isinstance(word, Heartbeat):
            far = max(far, FAR[2])
        step = max(0, committed - far) if is_over else unstarted(committed) + far
        now = {"generation": membership.generation} if hasattr(word, "generation") else {}
        return replace(word, step=step, incarnation=worker.incarnation, **now)


def _is_over(word: OfWorker, worker: WorkerId, membership: Membership) -> bool:
    """Return whether ``worker`` may not send ``word``, perhaps of an earlier process of its rank, now."""
    replays = membership.state.replay.is_companion(worker)  # then its message may be right
    is_member = membership.roster.member(worker) is not None
    return is_member and not replays and word.BY == WORKER and getattr(word, "step", 0) <= membership.committed


# --- drawn from seeds ------------------------------------------------------------------------------


def with_confused_workers(given: Scenario, random: Random) -> Scenario:
    """Confuse workers in one job of sixteen."""
    return confused(given, random) if random.random() < 1 / 16 else given


def confused(given: Scenario, random: Random) -> Scenario:
    """Return the job with one worker, or in a third of the cases two, confused from some time on."""
    seats = random.sample(given.shape.seats, random.choice((1, 1, 2)))
    at = random.randrange(CALM_US)
    confusion = Trouble("confused", at, tuple(seats), for_us=random.choice((300, 2_000, 20_000)) * MILLISECOND)
    return replace(given, troubles=given.troubles + (confusion,))
