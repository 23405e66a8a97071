"""Newcomers, from their first message to the generation in which they have work.

    behind -> catching up -> caught up -> announced -> entered -> a member like all

* *Behind*: its script replays the committed steps. Nobody else is concerned.
* *Catching up*: the stage's workers serve it.
* *Caught up*: it follows. Its state and its stage's are hashed after the step under way, and compared.
* *Announced*: a generation in which it has work is published, from a step that nobody can have started. This generation
  comes about only if the hashes are equal by then. Otherwise the newcomer follows on, and is announced again once they
  are.
* *Entered*: it has reported for that generation, and is waited for like all.

A loss, or the newcomer being late, takes it back to following, and it is announced again. A rejected step does not.
Each state has a deadline and a way on (docs/architecture.md). core/coordinator/returns.py decides what follows for the
job.

Newcomers of one failure domain (the shards of a seat, or all workers of a replica) come back together: they are
announced once all have caught up, have entered once all have, and are called off together. Each is compared with its
peers, which hold the same shard of the stage's other seats. So if replicas are the domain, a replica takes part only
when it is whole. Its quicker workers follow the others' steps meanwhile, and cost nobody anything.

If its stage is empty, a newcomer goes another way (core/coordinator/replays.py):

    behind -> replaying -> replayed -> entered -> a member like all

A newcomer of a stage that another one replays is *waiting* until that replay is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.coordinator.facts.recorded import Recorder
from recycle_plugin.core.coordinator.facts.replica_check import Mismatch, compared
from recycle_plugin.core.messages.from_coordinator import HashAfter, Serve
from recycle_plugin.core.messages.from_workers import StateHash
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.vocabulary.roster import FailureDomain, Member, Roster, WorkerId


class Phase(Enum):
    """How far a newcomer has come."""

    BEHIND = "behind"
    CATCHING_UP = "catching up"
    CAUGHT_UP = "caught up"
    ANNOUNCED = "announced"
    ENTERED = "entered"
    REPLAYING = "replaying"
    REPLAYED = "replayed"
    WAITING = "waiting"


COMING = (Phase.CATCHING_UP, Phase.CAUGHT_UP, Phase.ANNOUNCED)
"""The phases in which a newcomer takes its stage's state from others."""


@dataclass
class NewcomerRecord:
    """What is known of a newcomer.

    ``generation``, ``from_step``: the generation that it was last announced for, and the step from which that holds.
    ``awaited_at``: since when all others have reported for that generation, in seconds of the failure detector's clock.
    ``reported``: it has reported too. ``told``, ``told_evaluations``: how many steps and evaluations its script was
    told of. ``sources``: who is to serve it; ``came``: those who do. ``comparison``: the pending comparison of its
    state; ``equal``: the result of the last one. ``asked``: how often it has asked for its stage's state.
    """

    member: Member
    phase: Phase = Phase.BEHIND
    generation: int = 0
    from_step: int = 0
    awaited_at: float | None = None
    reported: bool = False
    told: int = 0
    told_evaluations: int = 0
    sources: frozenset[WorkerId] = field(default_factory=frozenset)
    came: set[WorkerId] = field(default_factory=set)
    comparison: Comparison | None = None
    equal: bool = False
    asked: int = 0

    @property
    def stage(self) -> int:
        return self.member.seat.stage

    @property
    def seat(self) -> Seat:
        return self.member.seat


class Comparison(NamedTuple):
    """A comparison of the states after ``step`` between the holders of ``shard`` of ``stage``."""

    stage: int
    shard: int
    step: int


class Joining:
    """The newcomers of a job, and the state hashes sent for them. ``size`` workers come as one, by ``domain``."""

    def __init__(self, size: int = 1, domain: FailureDomain = FailureDomain.SEAT) -> None:
        self._size, self._domain = size, domain
        self._newcomers: dict[WorkerId, NewcomerRecord] = {}
        self._patient = False  # announce only after equal hashes: they take longer than entering
        self._asked: dict[Comparison, set[WorkerId]] = {}  # whose hashes are compared
        self._hashes: dict[Comparison, dict[WorkerId, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._newcomers)

    def __iter__(self) -> Iterator[NewcomerRecord]:
        return iter(list(self._newcomers.values()))

    def get(self, worker: WorkerId) -> NewcomerRecord | None:
        """Return the record of the newcomer ``worker``; None for anybody else."""
        return self._newcomers.get(worker)

    def add(self, member: Member) -> NewcomerRecord:
        """Record a new newcomer, and return its record."""
        newcomer = self._newcomers[member.worker] = NewcomerRecord(member)
        return newcomer

    def forget(self, worker: WorkerId) -> NewcomerRecord | None:
        """Drop a newcomer that is gone, or is a member now. Return its record."""
        return self._newcomers.pop(worker, None)

    def tell(self, recorder: Recorder, committed: int, places: Mapping[int, Place], out: CoordinatorOutput) -> None:
        """Tell each newcomer's script the news that it lacks; see :meth:`tell_one`."""
        for each in self:
            self.tell_one(each, recorder, committed, places, out)

    @staticmethod
    def tell_one(
        one: NewcomerRecord, recorder: Recorder, committed: int, places: Mapping[int, Place], out: CoordinatorOutput
    ) -> None:
        """Tell a newcomer's script the steps and evaluations that it has not heard of, and its replica's place."""
        for message in recorder.told(committed, one.told, one.told_evaluations):
            out.tell(one.member.worker, replace(message, place=places.get(one.member.seat.replica)))
        one.told, one.told_evaluations = committed, recorder.evaluations

    # --- on its way --------------------------------------------------------------------------------

    def catch_up(self, newcomer: NewcomerRecord, roster: Roster, out: CoordinatorOutput) -> None:
        """Have the stage's workers serve a newcomer. Costs a message to each of them."""
        newcomer.phase, newcomer.awaited_at = Phase.CATCHING_UP, None
        newcomer.comparison, newcomer.equal, newcomer.came = None, False, set()
        newcomer.sources = frozenset(each.worker for each in roster.peers(newcomer.stage, newcomer.member.shard))
        for source in sorted(newcomer.sources):
            out.tell(source, Serve(newcomer.member.worker, newcomer.asked))

    def caught_up(
        self,
        newcomer: NewcomerRecord,
        sources: Collection[WorkerId],
        roster: Roster,
        committed: int,
        out: CoordinatorOutput,
    ) -> None:
        """Have a newcomer's state compared with that of its stage's workers. The newcomer follows the sums of
        ``sources``. Costs a message to each of them.

        The comparison is after step committed + 1, which nobody can have gone beyond: a worker applies committed + 2
        only after it has heard of that step's commit, which is sent after this message. The newcomer may have known
        before the coordinator that a source is gone, and then reports nothing more of it: hence ``came`` is cut down to
        ``sources``.
        """
        newcomer.came &= {*sources}
        if newcomer.phase is Phase.CATCHING_UP:
            newcomer.phase = Phase.CAUGHT_UP
        peers = {each.worker for each in roster.peers(newcomer.stage, newcomer.member.shard)}
        of = newcomer.comparison = Comparison(newcomer.stage, newcomer.member.shard, committed + 1)
        newcomer.equal = False
        asked = {*peers, newcomer.member.worker}
        self._asked.setdefault(of, set()).update(asked)
        for worker in sorted(asked):
            out.tell(worker, HashAfter(of.step))

    def see_sources(self, roster: Roster) -> list[NewcomerRecord]:
        """Drop sources that are gone. Return the newcomers that have none left. A newcomer that was served by a lost
        source gets that part of its state again, and reports having caught up anew. The loss of a source that has not
        served it is not reported.
        """
        left = []
        for each in self:
            if each.phase in COMING and not each.sources <= roster.workers:
                if not each.came <= roster.workers:
                    each.comparison, each.equal = None, False
                    each.phase = Phase.CATCHING_UP if each.awaited_at is None else each.phase
                each.sources = each.sources & roster.workers
                each.came &= each.sources
                left += [each] if not each.sources else []
        return left

    def with_(self, newcomer: NewcomerRecord) -> list[NewcomerRecord]:
        """Return the newcomers that are there and come as one with ``newcomer``, itself included. O(newcomers)."""
        unit = self._domain.unit(newcomer.member)
        return [each for each in self if self._domain.unit(each.member) == unit]

    def _whole(self, newcomers: Collection[NewcomerRecord]) -> list[NewcomerRecord]:
        counts = Counter(self._domain.unit(each.member) for each in newcomers)
        return [each for each in newcomers if counts[self._domain.unit(each.member)] == self._size]

    def ready(self) -> list[NewcomerRecord]:
        """Return the newcomers that only wait for a generation."""
        waiting = [
            each
            for each in self
            if each.phase in (Phase.CAUGHT_UP, Phase.ANNOUNCED)
            and each.awaited_at is None
            and (each.equal or not self._patient)
        ]
        return self._whole(waiting)

    def planned(self, roster: Roster) -> Roster:
        """Return ``roster`` with the newcomers that wait for a generation."""
        return Roster((*roster, *(each.member for each in self.ready() if each.member.worker not in roster.workers)))

    def unproven(self, roster: Roster) -> list[NewcomerRecord]:
        """Return newcomers in ``roster`` without proof of equal state. From then on, only proven ones are announced."""
        found = [
            each for each in self if each.phase in COMING and not each.equal and each.member.worker in roster.workers
        ]
        self._patient |= bool(found)
        return found

    def announced(self, generation: int, roster: Roster, from_step: int) -> None:
        """Record that ``generation``, of ``roster``, is published and holds from ``from_step`` on."""
        for each in self.ready():
            if each.member.worker in roster.workers:
                each.phase, each.generation, each.from_step = Phase.ANNOUNCED, generation, from_step
                each.reported = False
        for each in self:
            if each.phase is Phase.ANNOUNCED and each.member.worker not in roster.workers:
                each.phase = Phase.CAUGHT_UP  # another newcomer of its unit is not ready any more

    def called_off(self, roster: Roster) -> Roster:
        """Return ``roster`` without announced newcomers that have not entered; these follow on and wait anew."""
        waiting = [each for each in self if each.phase is Phase.ANNOUNCED]
        for each in waiting:
            each.phase, each.awaited_at = Phase.CAUGHT_UP, None
        return roster.without({each.member.worker for each in waiting})

    def left_out(self, roster: Roster) -> list[NewcomerRecord]:
        """Return entered newcomers that ``roster``, which replaces their generation, lacks; they follow again."""
        left = [each for each in self if each.phase is Phase.ENTERED and each.member.worker not in roster.workers]
        for each in left:
            each.phase, each.awaited_at = Phase.CAUGHT_UP, None
        return left

    def awaits(self, roster: Roster, clock: float) -> bool:
        """Return whether announced newcomers in ``roster`` are to report; their deadline starts at ``clock`` (s)."""
        awaited = [each for each in self if each.phase is Phase.ANNOUNCED and each.member.worker in roster.workers]
        for each in awaited:
            each.awaited_at = clock if each.awaited_at is None else each.awaited_at
        return bool(awaited)

    def admitted(self, roster: Roster) -> list[NewcomerRecord]:
        """Drop and return the newcomers that a generation of ``roster``, now in force, makes members like all."""
        done = [
            each
            for each in self
            if each.phase in (Phase.ENTERED, Phase.REPLAYED) and each.member.worker in roster.workers
        ]
        for each in done:
            self.forget(each.member.worker)
        return done

    @staticmethod
    def may_enter(newcomer: NewcomerRecord, generation: int, roster: Roster) -> bool:
        """Return whether a newcomer that reports for ``generation`` comes in by that report. Not if it was announced
        for a later generation, in place of one that was called off. Not if it has replayed a stage while ``roster``
        waits for others that replay.
        """
        announced = newcomer.phase is Phase.ANNOUNCED and generation >= newcomer.generation
        return announced or (newcomer.phase is Phase.REPLAYED and newcomer.member.worker in roster.workers)

    def reported(self, newcomer: NewcomerRecord) -> list[NewcomerRecord]:
        """Record a newcomer's report for its admission generation. Return its unit if all of it has reported, or []."""
        newcomer.reported = True
        unit = self.with_(newcomer)
        if len(unit) < self._size or not all(each.reported for each in unit):
            return []
        for each in unit:
            each.phase = Phase.ENTERED
        return unit

    def late(self, clock: float, limit_s: float) -> list[NewcomerRecord]:
        """Return the newcomers that all others have waited for, for more than ``limit_s`` seconds."""
        return [
            each
            for each in self
            if each.phase is Phase.ANNOUNCED and each.awaited_at is not None and clock - each.awaited_at > limit_s
        ]

    # --- hashes ------------------------------------------------------------------------------------

    @property
    def comparisons(self) -> int:
        """How many comparisons are pending."""
        return len(self._asked)

    def add_hash(self, message: StateHash, member: Member) -> None:
        """Record the hash of ``member``'s own state, if a comparison asks for it."""
        of = Comparison(member.seat.stage, member.shard, message.step)
        if of in self._asked:
            self._hashes.setdefault(of, {})[message.worker] = message.digest

    def mismatches(self, roster: Roster) -> Iterator[Mismatch]:
        """Yield the mismatches of comparisons whose hashes have all arrived. A newcomer's hash does not count for the
        majority.
        """
        for of, asked in list(self._asked.items()):
            said = self._hashes.get(of, {})
            trusted = [member for member in roster.peers(of.stage, of.shard) if member.worker in asked]
            new = [each for each in self if each.comparison == of and each.phase in COMING]
            workers = {one.worker for one in trusted if self.get(one.worker) is None}
            if not new or not workers or workers | {one.member.worker for one in new} <= said.keys():
                del self._asked[of]
                self._hashes.pop(of, None)
                if new and workers:
                    yield from compared(of.step, {one: said[one.worker] for one in trusted if one.worker in workers})
                    yield from self._judged(of.step, new, said, {said[worker] for worker in workers})

    @staticmethod
    def _judged(
        step: int, newcomers: list[NewcomerRecord], said: dict[WorkerId, str], right: set[str]
    ) -> Iterator[Mismatch]:
        for each in newcomers:
            each.comparison = None
            if {said[each.member.worker]} == right:
                each.equal = True
            else:
                yield Mismatch(step, (each.member,), majority=True)

    def loaded(self) -> None:
        """Drop the pending comparisons: all members have loaded another state."""
        self._asked.clear()
        self._hashes.clear()
