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

Where nobody is left in its stage it goes another way (core/coordinator/replays.py):

    behind -> replaying -> replayed -> entered -> a member like all

and one that comes to a stage which another one replays is *waiting* until that has done so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.coordinator.recorded import Recorder
from recycle_plugin.core.coordinator.replica_check import Mismatch, compared
from recycle_plugin.core.messages.protocol import Serve, StateHash
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId


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
    ``in_force_at``: when that came in force, in seconds of the failure detector's clock; ``told``,
    ``told_evaluations``: how many steps and evaluations its script was told of.
    """

    member: Member
    phase: Phase = Phase.BEHIND
    generation: int = 0
    from_step: int = 0
    in_force_at: float | None = None
    told: int = 0
    told_evaluations: int = 0

    @property
    def stage(self) -> int:
        """The stage that it is to hold."""
        return self.member.seat.stage


class Joining:
    """The newcomers of a job, and the hashes that are said for their sake."""

    def __init__(self) -> None:
        self._newcomers: dict[WorkerId, Newcomer] = {}
        self._asked: dict[tuple[int, int], set[WorkerId]] = {}  # by stage and step: whose hashes are to be equal
        self._hashes: dict[tuple[int, int], dict[WorkerId, str]] = {}

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
        for source in self._compare(newcomer.stage, step, roster):
            out.tell(source, Serve(newcomer.member.worker, step))

    def ready(self) -> list[Newcomer]:
        """The newcomers that only wait for a generation: to enter, or to be given work."""
        doubtful = {stage for stage, _ in self._asked}
        return [
            each
            for each in self
            if each.phase is Phase.EQUAL
            or (each.phase is Phase.CAUGHT_UP and each.stage not in doubtful)
            or (each.phase is Phase.ANNOUNCED and each.in_force_at is None)
        ]

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

    def called_off(self, roster: Roster) -> Roster:
        """The part of ``roster`` that a generation which holds at once is made of: who was announced and has not
        entered follows on, and waits for another one.
        """
        waiting = [each for each in self if each.phase is Phase.ANNOUNCED]
        for each in waiting:
            self._doubt_no_more(each.stage, each.from_step - 1)
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
                self._compare(each.stage, each.from_step - 1, roster)
        return done

    def has_entered(self, worker: WorkerId, generation: int) -> bool:
        """Notes that a newcomer has reported for ``generation``; returns whether it has entered by that the one that it
        was announced for, which is not so where that is a later one, in place of one that was called off.
        """
        newcomer = self.get(worker)
        if newcomer is None or newcomer.phase not in (Phase.ANNOUNCED, Phase.REPLAYED):
            return False
        if newcomer.phase is Phase.ANNOUNCED and generation < newcomer.generation:
            return False
        newcomer.phase = Phase.ENTERED
        return True

    def late(self, clock: float, limit_s: float) -> list[Newcomer]:
        """The newcomers that have not entered ``limit_s`` seconds after their generation came in force."""
        return [
            each
            for each in self
            if each.phase is Phase.ANNOUNCED and each.in_force_at is not None and clock - each.in_force_at > limit_s
        ]

    # --- hashes ------------------------------------------------------------------------------------

    def _compare(self, stage: int, step: int, roster: Roster) -> set[WorkerId]:
        """Has the state of the stage's workers compared; returns these."""
        workers = {member.worker for member in roster.stage(stage) if not member.joining}
        self._asked.setdefault((stage, step), set()).update(workers)
        return workers

    @property
    def comparisons(self) -> int:
        """How many are still to be made."""
        return len(self._asked)

    def add_hash(self, message: StateHash, stage: int) -> None:
        """Takes in the hash of a worker's state."""
        if (stage, message.step) in self._asked:
            self._hashes.setdefault((stage, message.step), {})[message.worker] = message.digest

    def mismatches(self, roster: Roster) -> Iterator[Mismatch]:
        """What differs among those of whom all hashes are there.  A newcomer has no say in what is right."""
        for (stage, step), asked in list(self._asked.items()):
            said = self._hashes.get((stage, step), {})
            trusted = [member for member in roster.stage(stage) if member.worker in asked]
            new = [
                each
                for each in self
                if each.phase in (Phase.ANNOUNCED, Phase.ENTERED)
                and each.in_force_at is not None
                and (each.stage, each.from_step - 1) == (stage, step)
            ]
            if all(
                worker in said for worker in (*(one.worker for one in trusted), *(one.member.worker for one in new))
            ):
                self._doubt_no_more(stage, step)
                yield from compared(step, {member: said[member.worker] for member in trusted})
                yield from self._judged(step, new, said, {said[member.worker] for member in trusted})

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

    def _doubt_no_more(self, stage: int, step: int) -> None:
        self._asked.pop((stage, step), None)
        self._hashes.pop((stage, step), None)
