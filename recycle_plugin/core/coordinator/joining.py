"""Newcomers, from their word that they are there to the generation in which they have work.

    behind -> catching up -> caught up -> announced -> entered -> equal -> a member like all

* *Behind*: its script replays what is committed.  Nobody else is concerned.
* *Catching up*: the stage's workers serve it, and say the hash of their state after one step, by which they are
  compared before any of it is trusted.
* *Caught up*: it follows.  A generation is announced, from a step that nobody can have started, in which it is a
  *joining* member: part of sums and steps, and without work.
* *Entered*: it has come to that step.  The state before it is hashed by it and by its stage's workers.
* *Equal*: the next generation gives it work.

Until it has entered, a loss, or its being late, takes it back to where it follows, and it is announced anew.  What
becomes of any of this for the job core/coordinator/course.py decides.

Those that are given up as one, the shards of a seat or all workers of a replica, come back together: they are
announced when all of them have caught up, have entered when all have, get work when all are equal, and are called off
together.  Each is compared with its peers, which hold the same shard of other seats of its stage.  So a replica that is
the unit takes part only when it is whole: until its last worker has caught up, those that were quicker follow the
others' steps, and cost nobody anything.

Where nobody is left in its stage it goes another way (core/coordinator/replays.py):

    behind -> replaying -> replayed -> entered -> a member like all

and one that comes to a stage which another one replays is *waiting* until that has done so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.coordinator.recorded import Recorder
from recycle_plugin.core.coordinator.replica_check import Mismatch, compared
from recycle_plugin.core.messages.from_coordinator import Serve
from recycle_plugin.core.messages.from_workers import StateHash
from recycle_plugin.core.vocabulary.commit_rule import unstarted
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
    EQUAL = "equal"
    REPLAYING = "replaying"
    REPLAYED = "replayed"
    WAITING = "waiting"


@dataclass
class Newcomer:
    """One of them.  ``generation``: the one that it was announced for last, from step ``from_step`` on;
    ``in_force_at``: when that came in force, in seconds of the failure detector's clock; ``reported``: it has reported
    for that; ``told``,
    ``told_evaluations``: how many steps and evaluations its script was told of.
    """

    member: Member
    phase: Phase = Phase.BEHIND
    generation: int = 0
    from_step: int = 0
    in_force_at: float | None = None
    reported: bool = False
    told: int = 0
    told_evaluations: int = 0

    @property
    def stage(self) -> int:
        """The stage that it is to hold."""
        return self.member.seat.stage

    @property
    def seat(self) -> Seat:
        """The seat that it is to hold, or a shard of it."""
        return self.member.seat

    def compared_at(self, step: int) -> Comparison:
        """The comparison of its state after ``step``."""
        return Comparison(self.stage, self.member.shard, step)


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
        self._newcomers: dict[WorkerId, Newcomer] = {}
        self._asked: dict[Comparison, set[WorkerId]] = {}  # whose hashes are to be equal
        self._hashes: dict[Comparison, dict[WorkerId, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._newcomers)

    def __iter__(self) -> Iterator[Newcomer]:
        return iter(list(self._newcomers.values()))

    def get(self, worker: WorkerId) -> Newcomer | None:
        """The newcomer that ``worker`` is; None for anybody else."""
        return self._newcomers.get(worker)

    def add(self, member: Member) -> Newcomer:
        """Takes in that a newcomer is there."""
        newcomer = self._newcomers[member.worker] = Newcomer(replace(member, joining=True))
        return newcomer

    def forget(self, worker: WorkerId) -> Newcomer | None:
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

    def catch_up(self, newcomer: Newcomer, roster: Roster, committed: int, out: CoordinatorOutput) -> None:
        """Has the stage's workers serve a newcomer, and hash their state.  Costs a message to each of them."""
        newcomer.phase, newcomer.in_force_at, step = Phase.CATCHING_UP, None, unstarted(committed)
        for source in self._compare(newcomer.compared_at(step), roster):
            out.tell(source, Serve(newcomer.member.worker, step))

    def with_(self, newcomer: Newcomer) -> list[Newcomer]:
        """The newcomers that come as one with ``newcomer``, itself included, as far as they are there.  Costs one look
        at each newcomer.
        """
        unit = self._domain.unit(newcomer.member)
        return [each for each in self if self._domain.unit(each.member) == unit]

    def _whole(self, newcomers: Collection[Newcomer]) -> list[Newcomer]:
        """Those of ``newcomers`` that are all of their unit."""
        counts = Counter(self._domain.unit(each.member) for each in newcomers)
        return [each for each in newcomers if counts[self._domain.unit(each.member)] == self._size]

    def ready(self) -> list[Newcomer]:
        """The newcomers that only wait for a generation: to enter, or to be given work."""
        doubtful = {(of.stage, of.shard) for of in self._asked}
        equal = [each for each in self if each.phase is Phase.EQUAL]
        waiting = [
            each
            for each in self
            if (each.phase is Phase.CAUGHT_UP and (each.stage, each.member.shard) not in doubtful)
            or (each.phase is Phase.ANNOUNCED and each.in_force_at is None)
        ]
        whole = {each.member.worker for each in (*self._whole(equal), *self._whole(waiting))}
        return [each for each in self if each.member.worker in whole]

    def planned(self, roster: Roster) -> Roster:
        """The roster of a generation to come: ``roster``, with those who wait for it."""
        ready = {each.member.worker: each for each in self.ready()}
        members = [replace(member, joining=False) if member.worker in ready else member for member in roster]
        return Roster((*members, *(each.member for each in ready.values() if each.phase is not Phase.EQUAL)))

    def announced(self, generation: int, roster: Roster, from_step: int) -> None:
        """Notes that ``generation``, of ``roster``, is published, which holds from ``from_step`` on."""
        for each in self.ready():
            if each.phase is not Phase.EQUAL and each.member.worker in roster.workers:
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
            self._doubt_no_more(each.compared_at(each.from_step - 1))
            each.phase, each.in_force_at = Phase.CAUGHT_UP, None
        return roster.without({each.member.worker for each in waiting})

    def in_force(self, roster: Roster, clock: float) -> list[Newcomer]:
        """Notes that a generation of ``roster`` has come about; returns who is a newcomer no more."""
        done = []
        for each in self:
            member = roster.member(each.member.worker)
            if member is not None and not member.joining:
                done.append(each)
                self.forget(member.worker)
            elif member is not None and each.phase in (Phase.ANNOUNCED, Phase.ENTERED) and each.in_force_at is None:
                each.in_force_at = clock
                self._compare(each.compared_at(each.from_step - 1), roster)
        return done

    @staticmethod
    def may_enter(newcomer: Newcomer, generation: int, roster: Roster) -> bool:
        """Whether a newcomer that reports for ``generation`` comes in by that; not where it was announced for a later
        one, in place of one that was called off, or has replayed a stage while ``roster`` waits for others to.
        """
        announced = newcomer.phase is Phase.ANNOUNCED and generation >= newcomer.generation
        return announced or (newcomer.phase is Phase.REPLAYED and newcomer.member.worker in roster.workers)

    def reported(self, newcomer: Newcomer) -> list[Newcomer]:
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

    def late(self, clock: float, limit_s: float) -> list[Newcomer]:
        """The newcomers that have not entered ``limit_s`` seconds after their generation came in force."""
        return [
            each
            for each in self
            if each.phase is Phase.ANNOUNCED and each.in_force_at is not None and clock - each.in_force_at > limit_s
        ]

    # --- hashes ------------------------------------------------------------------------------------

    def _compare(self, of: Comparison, roster: Roster) -> set[WorkerId]:
        """Has the state of a shard's workers compared; returns these."""
        workers = {member.worker for member in roster.peers(of.stage, of.shard) if not member.joining}
        self._asked.setdefault(of, set()).update(workers)
        return workers

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
            new = [
                each
                for each in self
                if each.phase in (Phase.ANNOUNCED, Phase.ENTERED)
                and each.in_force_at is not None
                and each.compared_at(each.from_step - 1) == of
            ]
            workers = (*(one.worker for one in trusted), *(one.member.worker for one in new))
            if all(worker in said for worker in workers) and all(each.phase is Phase.ENTERED for each in new):
                self._doubt_no_more(of)
                yield from compared(of.step, {member: said[member.worker] for member in trusted})
                yield from self._judged(of.step, new, said, {said[member.worker] for member in trusted})

    @staticmethod
    def _judged(step: int, newcomers: list[Newcomer], said: dict[WorkerId, str], right: set[str]) -> Iterator[Mismatch]:
        for each in newcomers:
            if {said[each.member.worker]} == right:
                each.phase = Phase.EQUAL
            else:
                yield Mismatch(step, (each.member,), majority=True)

    def loaded(self) -> None:
        """Takes in that the states which were to be compared are no more: all members have loaded the same one."""
        self._asked.clear()
        self._hashes.clear()
        for each in self:
            each.phase = Phase.EQUAL

    def _doubt_no_more(self, of: Comparison) -> None:
        self._asked.pop(of, None)
        self._hashes.pop(of, None)
