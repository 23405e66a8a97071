"""Newcomers, from their word that they are there to the generation in which they have work.

    behind -> catching up -> caught up -> announced -> entered -> a member like all

* *Behind*: its script replays what is committed.  Nobody else is concerned.
* *Catching up*: the stage's workers serve it.
* *Caught up*: it follows.  Its state and that of its stage's workers after the step under way are hashed and compared.
* *Announced*: a generation is published, from a step that nobody can have started, in which it has work.  That comes
  about only if the hashes are equal by then.  Otherwise the newcomer follows on, and is announced again once they are.
* *Entered*: it has reported for that generation, and is waited for like all.

A loss, or its being late, takes it back to where it follows, and it is announced anew; a rejected step does not.  Each
of these states has a deadline and a way on (docs/architecture.md).  What becomes of any of this for the job
core/coordinator/returns.py decides.

Those that are given up as one, the shards of a seat or all workers of a replica, come back together: they are
announced when all of them have caught up, have entered when all have, and are called off together.  Each is compared
with its peers, which hold the same shard of other seats of its stage.  So a replica that is the unit takes part only
when it is whole: until its last worker has caught up, those that were quicker follow the others' steps, and cost nobody
anything.

Where nobody is left in its stage it goes another way (core/coordinator/replays.py):

    behind -> replaying -> replayed -> entered -> a member like all

and one that comes to a stage which another one replays is *waiting* until that has done so.
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
    """One of them.  ``generation``: the one that it was announced for last, from step ``from_step`` on;
    ``awaited_at``: since when all others have reported for that, in seconds of the failure detector's clock;
    ``reported``: it has done so; ``told``, ``told_evaluations``: how many steps and evaluations its script was told of.

    ``sources``: who is to serve it, and ``came``: who of them does; ``comparison``: that of its state; ``equal``: the
    result.
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

    @property
    def stage(self) -> int:
        return self.member.seat.stage

    @property
    def seat(self) -> Seat:
        """The seat that it is to hold, or a shard of it."""
        return self.member.seat


class Comparison(NamedTuple):
    """A comparison of the states after ``step`` of those that hold ``shard`` of ``stage``."""

    stage: int
    shard: int
    step: int


class Joining:
    """The newcomers of a job in which so many workers (``size``) are given up as one, by ``domain``, and the hashes
    that are said for their sake.
    """

    def __init__(self, size: int = 1, domain: FailureDomain = FailureDomain.SEAT) -> None:
        self._size, self._domain = size, domain
        self._newcomers: dict[WorkerId, NewcomerRecord] = {}
        self._patient = False  # hashes take longer than it takes to enter
        self._asked: dict[Comparison, set[WorkerId]] = {}  # whose hashes are to be equal
        self._hashes: dict[Comparison, dict[WorkerId, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._newcomers)

    def __iter__(self) -> Iterator[NewcomerRecord]:
        return iter(list(self._newcomers.values()))

    def get(self, worker: WorkerId) -> NewcomerRecord | None:
        """The newcomer that ``worker`` is; None for anybody else."""
        return self._newcomers.get(worker)

    def add(self, member: Member) -> NewcomerRecord:
        """Takes in that a newcomer is there."""
        newcomer = self._newcomers[member.worker] = NewcomerRecord(member)
        return newcomer

    def forget(self, worker: WorkerId) -> NewcomerRecord | None:
        """Takes in that a newcomer is gone, or is one no more; returns it."""
        return self._newcomers.pop(worker, None)

    def tell(self, recorder: Recorder, committed: int, places: Mapping[int, Place], out: CoordinatorOutput) -> None:
        """Tells all newcomers' scripts what is over that they have not been told of, and at which of ``places`` their
        replicas' plain iterators stand.  Costs a message for each.
        """
        for each in self:
            for message in recorder.told(committed, each.told, each.told_evaluations):
                out.tell(each.member.worker, replace(message, place=places.get(each.member.seat.replica)))
            each.told, each.told_evaluations = committed, recorder.evaluations

    # --- on its way --------------------------------------------------------------------------------

    def catch_up(self, newcomer: NewcomerRecord, roster: Roster, out: CoordinatorOutput) -> None:
        """Has the stage's workers serve a newcomer.  Costs a message to each of them."""
        newcomer.phase, newcomer.awaited_at = Phase.CATCHING_UP, None
        newcomer.comparison, newcomer.equal, newcomer.came = None, False, set()
        newcomer.sources = frozenset(each.worker for each in roster.peers(newcomer.stage, newcomer.member.shard))
        for source in sorted(newcomer.sources):
            out.tell(source, Serve(newcomer.member.worker))

    def caught_up(
        self,
        newcomer: NewcomerRecord,
        sources: Collection[WorkerId],
        roster: Roster,
        committed: int,
        out: CoordinatorOutput,
    ) -> None:
        """Has the state of a newcomer, which follows the sums of ``sources``, compared with that of its stage's
        workers, after the first step that nobody can have gone beyond.  Costs a message to each of them.

        Who applies step committed + 2 has heard that the one before is committed, which is said after this.  Of a
        source that is gone the newcomer may have known before the coordinator: it says nothing more of that.
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
        """Takes in who is left; returns the newcomers that have no source any more.  A newcomer that was served by one
        of those who are gone gets a part of its state anew, and says so; of others it hears nothing.
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
        """The newcomers that come as one with ``newcomer``, itself included, as far as they are there.  Costs one look
        at each newcomer.
        """
        unit = self._domain.unit(newcomer.member)
        return [each for each in self if self._domain.unit(each.member) == unit]

    def _whole(self, newcomers: Collection[NewcomerRecord]) -> list[NewcomerRecord]:
        """Those of ``newcomers`` that are all of their unit."""
        counts = Counter(self._domain.unit(each.member) for each in newcomers)
        return [each for each in newcomers if counts[self._domain.unit(each.member)] == self._size]

    def ready(self) -> list[NewcomerRecord]:
        """The newcomers that only wait for a generation."""
        waiting = [
            each
            for each in self
            if each.phase in (Phase.CAUGHT_UP, Phase.ANNOUNCED)
            and each.awaited_at is None
            and (each.equal or not self._patient)
        ]
        return self._whole(waiting)

    def planned(self, roster: Roster) -> Roster:
        """The roster of a generation to come: ``roster``, with those who wait for it."""
        return Roster((*roster, *(each.member for each in self.ready() if each.member.worker not in roster.workers)))

    def unproven(self, roster: Roster) -> list[NewcomerRecord]:
        """The newcomers in ``roster`` whose state is not known to be right; none is announced so early again."""
        found = [
            each for each in self if each.phase in COMING and not each.equal and each.member.worker in roster.workers
        ]
        self._patient |= bool(found)
        return found

    def announced(self, generation: int, roster: Roster, from_step: int) -> None:
        """Notes that ``generation``, of ``roster``, is published, which holds from ``from_step`` on."""
        for each in self.ready():
            if each.member.worker in roster.workers:
                each.phase, each.generation, each.from_step = Phase.ANNOUNCED, generation, from_step
                each.reported = False
        for each in self:
            if each.phase is Phase.ANNOUNCED and each.member.worker not in roster.workers:
                each.phase = Phase.CAUGHT_UP  # another one that comes as one with it is not ready any more

    def called_off(self, roster: Roster) -> Roster:
        """The part of ``roster`` that a generation which holds at once is made of: who was announced and has not
        entered follows on, and waits for another one.
        """
        waiting = [each for each in self if each.phase is Phase.ANNOUNCED]
        for each in waiting:
            each.phase, each.awaited_at = Phase.CAUGHT_UP, None
        return roster.without({each.member.worker for each in waiting})

    def left_out(self, roster: Roster) -> list[NewcomerRecord]:
        """Takes back to where they follow those that have entered a generation which never came in force, in whose
        place one of ``roster`` comes; returns them.
        """
        left = [each for each in self if each.phase is Phase.ENTERED and each.member.worker not in roster.workers]
        for each in left:
            each.phase, each.awaited_at = Phase.CAUGHT_UP, None
        return left

    def awaits(self, roster: Roster, clock: float) -> bool:
        """Whether somebody who is announced for a generation of ``roster`` has not reported, as all members have now;
        ``clock``: of the failure detector, in seconds.
        """
        awaited = [each for each in self if each.phase is Phase.ANNOUNCED and each.member.worker in roster.workers]
        for each in awaited:
            each.awaited_at = clock if each.awaited_at is None else each.awaited_at
        return bool(awaited)

    def admitted(self, roster: Roster) -> list[NewcomerRecord]:
        """The newcomers that a generation of ``roster``, which has come about, makes members like all."""
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
        """Whether a newcomer that reports for ``generation`` comes in by that; not where it was announced for a later
        one, in place of one that was called off, or has replayed a stage while ``roster`` waits for others to.
        """
        announced = newcomer.phase is Phase.ANNOUNCED and generation >= newcomer.generation
        return announced or (newcomer.phase is Phase.REPLAYED and newcomer.member.worker in roster.workers)

    def reported(self, newcomer: NewcomerRecord) -> list[NewcomerRecord]:
        """Notes that a newcomer has reported for the generation that it was announced for, or let in by; returns who
        has entered by that: all that come as one with it, once every one of them has reported.
        """
        newcomer.reported = True
        unit = self.with_(newcomer)
        if len(unit) < self._size or not all(each.reported for each in unit):
            return []
        for each in unit:
            each.phase = Phase.ENTERED
        return unit

    def late(self, clock: float, limit_s: float) -> list[NewcomerRecord]:
        """The newcomers that all others have waited for, for more than ``limit_s`` seconds."""
        return [
            each
            for each in self
            if each.phase is Phase.ANNOUNCED and each.awaited_at is not None and clock - each.awaited_at > limit_s
        ]

    # --- hashes ------------------------------------------------------------------------------------

    @property
    def comparisons(self) -> int:
        """How many are still to be made."""
        return len(self._asked)

    def add_hash(self, message: StateHash, member: Member) -> None:
        """Takes in the hash of the state of ``member``, who says it."""
        of = Comparison(member.seat.stage, member.shard, message.step)
        if of in self._asked:
            self._hashes.setdefault(of, {})[message.worker] = message.digest

    def mismatches(self, roster: Roster) -> Iterator[Mismatch]:
        """What differs among those of whom all hashes are there.  A newcomer has no say in what is right."""
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
        """Takes in that the states which were to be compared are no more: all members have loaded the same one."""
        self._asked.clear()
        self._hashes.clear()
