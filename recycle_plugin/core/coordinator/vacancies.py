"""The seats of lost workers, and who is to hold them next: a *newcomer*, the next process of the same rank.

* A seat is vacant once its worker is known to be dead: a supervisor has seen the process end.  A spare that waits takes
  it, or else its own supervisor starts the next process, as core/coordinator/restarts.py decides.
* Who comes from elsewhere (``--join``) gets a vacant seat, or one of a host that is gone; one that its own supervisor
  is about to fill only where no other is free.  Else it waits as a *spare*.
* Who leaves as planned stays away, and its supervisor stays, until an operator admits the seat again
  (core/coordinator/operating.py); its seat is nobody's until then.  On a host that is drained nobody is started.
* Each newcomer has an incarnation that nobody has had.  Until it is admitted it is no member, and nothing that it does
  costs the others anything; where it dies, the seat is vacant again.
* Those that are given up as one, the shards of a seat or the workers of a replica, come together: where one dies the
  others are ended, and when all are dead, all are started at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from recycle_plugin.core.coordinator.output import CoordinatorOutput, Joiner, SupervisorOf
from recycle_plugin.core.coordinator.restarts import Restarts
from recycle_plugin.core.messages.from_coordinator import Fence, Refused, Restart, Seated, Stay
from recycle_plugin.core.messages.from_workers import Exited
from recycle_plugin.core.vocabulary.describe import how_ended
from recycle_plugin.core.vocabulary.roster import WorkerId

OVER = "the job is over"


@dataclass
class Vacancy:
    """A vacant seat, or a shard of it.  ``newcomer``: who is to hold it; ``due``: when its own supervisor starts that,
    in seconds; ``come``: it has connected; ``heard``: when its supervisor has last said that its process is there.
    ``before``: who held it last, or was to, ``how`` that has ended, in words, and whether ``in_vain``: before it was
    admitted.
    """

    newcomer: WorkerId | None = None
    due: float = 0.0
    come: bool = False
    heard: float | None = None
    before: WorkerId | None = None
    how: str = ""
    in_vain: bool = False


class Vacancies:
    """The vacant seats of a job, those that wait for one, and which process of a rank is which."""

    def __init__(self) -> None:
        self._restarts = Restarts()
        self._names: Mapping[int, str] = {}  # by rank, once the job has started
        self._together: dict[int, tuple[int, ...]] = {}  # by rank, all that come as one, itself included
        self._absent_s = 0.0  # for so long a supervisor may be gone before its host is
        self._members: set[WorkerId] = set()  # all that have ever been
        self._unproven: set[WorkerId] = set()  # of them, those with whom no step was committed yet
        self._admitted: dict[WorkerId, int] = {}  # of these, those that have work, and behind which step they got it
        self._vacant: dict[int, Vacancy] = {}  # by rank
        self._holders: dict[int, int] = {}  # by rank, the incarnation that holds the seat, or is to
        self._numbers: dict[int, int] = {}  # by rank, the largest incarnation that anybody has got
        self._absent: dict[int, float] = {}  # by rank, since when its supervisor is gone, in seconds
        self._silent: set[int] = set()  # ranks whose hosts are gone without a word
        self._unguarded: set[int] = set()  # ranks that nobody is left to start a process of
        self._spares: dict[int, str] = {}  # by their numbers, the hosts of those that wait for a seat
        self._away: set[int] = set()  # ranks that are to leave as planned, or have, until they are admitted
        self._staying: set[int] = set()  # ranks whose supervisors are to stay, whatever their last process has said
        self._hosts: dict[int, str] = {}  # by rank, where its processes are started
        self._drained: set[str] = set()  # hosts on which nobody is started
        self._over = False

    def begin(
        self,
        rejoin: str | int,
        names: Mapping[int, str],
        hosts: Mapping[int, str],
        units: Collection[tuple[int, ...]],
        workers: Collection[WorkerId],
        absent_s: float,
    ) -> None:
        """Starts with ``workers`` as members.  ``names``: of all ranks, for people; ``hosts``: of all ranks;
        ``units``: the ranks that come as one; ``absent_s``: where a supervisor is gone for so many seconds, so is its
        host.
        """
        self._together = {rank: ranks for ranks in units for rank in ranks}
        self._restarts, self._names, self._absent_s = Restarts(rejoin), dict(names), absent_s
        self._hosts = dict(hosts)
        self._members = set(workers)
        self._holders = dict(workers)

    # --- who is who ------------------------------------------------------------------------------

    def identify(self, claimed: WorkerId) -> WorkerId:
        """The identity of a process that comes as ``claimed``: that one, if it is the first of its rank or was asked
        for, else one that nobody has had.
        """
        first = not claimed.incarnation and claimed.rank not in self._numbers
        number = claimed.incarnation if first or self._is_expected(claimed) else self._unused(claimed.rank)
        self._numbers[claimed.rank] = max(number, self._numbers.get(claimed.rank, 0))
        return WorkerId(claimed.rank, number)

    def _is_expected(self, worker: WorkerId) -> bool:
        return self.is_newcomer(worker) and not self._vacant[worker.rank].come

    def _unused(self, rank: int) -> int:
        return max(self._numbers.get(rank, 0), self._holders.get(rank, 0)) + 1

    def is_newcomer(self, worker: WorkerId) -> bool:
        """Whether ``worker`` is to hold a vacant seat, and is no member yet."""
        vacancy = self._vacant.get(worker.rank)
        return vacancy is not None and vacancy.newcomer == worker

    def is_outside(self, worker: WorkerId) -> bool:
        """Whether the job has started, and ``worker`` has never been a member."""
        return bool(self._names) and worker not in self._members

    @property
    def empty(self) -> frozenset[int]:
        """The ranks that are vacant, and whose newcomer has not connected."""
        return frozenset(rank for rank, vacancy in self._vacant.items() if not vacancy.come)

    @property
    def newcomers(self) -> tuple[WorkerId, ...]:
        """All newcomers, whether they have connected or not."""
        return tuple(vacancy.newcomer for vacancy in self._vacant.values() if vacancy.newcomer is not None)

    @property
    def has_spares(self) -> bool:
        """Whether anybody waits for a seat."""
        return bool(self._spares)

    # --- vacant, and filled again ----------------------------------------------------------------

    def lost(self, message: Exited, how: str, ending: bool, now: float, out: CoordinatorOutput) -> None:
        """Takes in that a lost member is dead, ``how`` in words, and sees to its seat; once for each of them."""
        worker = message.worker
        if worker.rank in self._vacant or worker.incarnation != self._holders.get(worker.rank):
            return
        self._silent.discard(worker.rank)  # its supervisor has been heard
        in_vain = worker in self._unproven
        self._unproven.discard(worker)
        self._goes_with(message)
        self._vacant[worker.rank] = Vacancy(before=worker, how=how, in_vain=in_vain)
        self._fill(worker.rank, ending, now, out)

    def died(self, message: Exited, ending: bool, now: float, out: CoordinatorOutput) -> list[WorkerId]:
        """Takes in that a process which is no member has ended; returns who is ended with it."""
        if not self.is_newcomer(message.worker):
            return []
        self._goes_with(message)
        return self._in_vain(message.worker, f"its process {how_ended(message.code)}", ending, now, out)

    def _goes_with(self, message: Exited) -> None:
        """Note that a supervisor goes with a worker that says that all is well."""
        if message.code == 0 and message.rank not in self._away:
            self._unguarded.add(message.rank)

    def _in_vain(self, worker: WorkerId, how: str, ending: bool, now: float, out: CoordinatorOutput) -> list[WorkerId]:
        """Takes in that a newcomer is no more, and ends those that were to come as one with it; returns these."""
        self._vacant[worker.rank] = Vacancy(before=worker, how=how, in_vain=True)
        others = [self._vacant[rank] for rank in self._together[worker.rank] if self.is_filled(rank)]
        ended = []
        for other in others:
            assert other.newcomer is not None, "it is filled"
            ended.append(other.newcomer)
            why = f"it is ended with {self._names[worker.rank]}, which was to come with it: {how}"
            out.fence(other.newcomer, why)
            if not other.come:  # it may never be started, and then nobody says that it has ended
                self._vacant[other.newcomer.rank] = Vacancy(before=other.newcomer, how=why, in_vain=True)
        self._fill(worker.rank, ending, now, out)
        return ended

    def _fill(self, rank: int, ending: bool, now: float, out: CoordinatorOutput) -> None:
        """Sees to a unit's seats once all that have held them are dead."""
        ranks = self._together[rank]
        if any(each not in self._vacant or self.is_filled(each) for each in ranks):
            return
        if any(self._vacant[each].in_vain for each in ranks):
            self._restarts.in_vain(ranks[0])
        for each in ranks:
            self._vacant[each].in_vain = False
        for each in ranks:
            if each not in self._away and self._spares and not ending:
                number = next(iter(self._spares))
                self._seat(number, self._spares.pop(number), each, out)
        self._start_all([each for each in ranks if not self.is_filled(each)], ending, now, out)

    def _start_all(self, ranks: Collection[int], ending: bool, now: float, out: CoordinatorOutput) -> None:
        """Has the supervisors of ``ranks``, of one unit, start its next holders, unless one of them can't."""
        if any(rank in self._away or self._hosts[rank] in self._drained for rank in ranks):
            return
        unguarded = any(rank in self._unguarded for rank in ranks)
        for rank in ranks:
            before, how = self._vacant[rank].before, self._vacant[rank].how
            assert before is not None, "somebody has held it"
            unit = self._together[rank][0]
            after_s = self._restarts.decide(before, self._names[rank], how, ending, unguarded, out, unit)
            if after_s is not None:
                self._start(rank, after_s, now, out)

    def _start(self, rank: int, after_s: float, now: float, out: CoordinatorOutput) -> None:
        number = self._unused(rank)
        self._staying.discard(rank)
        self._holders[rank] = self._numbers[rank] = number
        self._vacant[rank] = Vacancy(WorkerId(rank, number), now + after_s)
        out.tell(SupervisorOf(rank), Restart(rank, after_s, incarnation=number))

    def come(self, worker: WorkerId) -> bool:
        """Takes in that ``worker`` has connected; returns whether it was asked for."""
        if not self._is_expected(worker):
            return False
        self._vacant[worker.rank].come = True
        return True

    def entered(self, worker: WorkerId) -> None:
        """Makes a newcomer a member, whose seat is vacant no more; where it is lost before it is admitted, it has come
        in vain.
        """
        del self._vacant[worker.rank]
        self._members.add(worker)
        self._unproven.add(worker)

    def left_out(self, worker: WorkerId) -> None:
        """Makes a newcomer of one that has entered, and is to wait for another generation."""
        self._members.discard(worker)
        self._unproven.discard(worker)
        self._vacant[worker.rank] = Vacancy(worker, come=True)

    def admitted(self, worker: WorkerId, committed: int) -> None:
        """Notes that a newcomer has become a member like all, behind step ``committed``."""
        self._admitted[worker] = committed

    def committed(self, step: int) -> None:
        """Takes in that ``step`` is committed: who was admitted before its predecessor was has not come in vain, and is
        counted no more.  One look at each of those since.
        """
        for worker in [worker for worker, behind in self._admitted.items() if step > behind + 1]:
            del self._admitted[worker]
            if worker in self._unproven:
                self._unproven.discard(worker)
                self._restarts.admitted(self._together[worker.rank][0])

    # --- supervisors, and hosts that are gone ----------------------------------------------------

    def supervised(self, rank: int, now: float, out: CoordinatorOutput) -> None:
        """Takes in that the supervisor of ``rank`` is there, again perhaps: then it may have missed what it is to
        start.
        """
        self._absent.pop(rank, None)
        self._silent.discard(rank)
        vacancy = self._vacant.get(rank)
        if rank in self._staying:
            self._say_stay(rank, out)
        if vacancy is not None and vacancy.newcomer is not None and not vacancy.come:
            wait_s = max(0.0, vacancy.due - now)
            out.tell(SupervisorOf(rank), Restart(rank, wait_s, incarnation=vacancy.newcomer.incarnation))

    def unsupervised(self, rank: int, now: float) -> None:
        """Takes in that the supervisor of ``rank`` is gone; another may come."""
        self._absent[rank] = now

    def heard(self, worker: WorkerId, now: float) -> None:
        """Takes in that the supervisor of ``worker`` has said that its process is there."""
        if self.is_newcomer(worker):
            self._vacant[worker.rank].heard = now

    def silent(self, rank: int) -> None:
        """Notes that nothing is heard of the host of ``rank``."""
        self._silent.add(rank)

    def unguarded(self, worker: WorkerId) -> None:
        """Notes that the guard of ``worker`` is gone, so that nobody is left there to start another one."""
        if worker.incarnation == self._holders.get(worker.rank):
            self._unguarded.add(worker.rank)

    def tick(
        self, unreachable: Collection[WorkerId], ending: bool, now: float, out: CoordinatorOutput
    ) -> list[WorkerId]:
        """Lets time pass, which may show that a host is gone; returns the newcomers that go with it.  ``unreachable``:
        lost workers that are not known to be dead.  Costs one look at each vacant seat and at each supervisor that is
        gone.
        """
        gone: list[WorkerId] = []
        for worker in self.newcomers:
            if self.is_host_gone(worker.rank, now) or self._is_silent(worker.rank, now):
                self._unguarded.add(worker.rank)
                out.fence(worker, "its host is gone")
                gone += [worker, *self._in_vain(worker, "its host is gone", ending, now, out)]
        while self._spares and not ending and (ranks := self._gone(unreachable, now)):
            number = next(iter(self._spares))
            self._seat(number, self._spares.pop(number), ranks[0], out)
        return gone

    def is_host_gone(self, rank: int, now: float) -> bool:
        """Whether the host on which the processes of ``rank`` are started is gone, or as good as that."""
        return rank in self._silent or now - self._absent.get(rank, now) > self._absent_s

    def _is_silent(self, rank: int, now: float) -> bool:
        heard = self._vacant[rank].heard
        return heard is not None and now - heard > self._absent_s

    def _gone(self, unreachable: Collection[WorkerId], now: float) -> list[int]:
        """The ranks of lost workers whose hosts are gone, and whom nobody follows yet."""
        return sorted(
            rank
            for rank, incarnation in unreachable
            if rank not in self._vacant and incarnation == self._holders.get(rank) and self.is_host_gone(rank, now)
        )

    # --- from elsewhere --------------------------------------------------------------------------

    def join(
        self,
        number: int,
        host: str,
        waits: bool,
        unreachable: Collection[WorkerId],
        ending: bool,
        now: float,
        out: CoordinatorOutput,
    ) -> None:
        """Gives a supervisor on ``host`` that asks for a seat one that is free, or keeps it as a spare where it
        ``waits``; else it is told that there is none.
        """
        if ending or self._over:
            out.tell(Joiner(number), Refused(OVER if self._over else "the job is about to end"))
        elif free := self._free(unreachable, now):
            self._seat(number, host, free[0], out)
        elif waits:
            self._spares[number] = host
            out.say("spare", f"host {host} waits as a spare: it takes the next seat that is lost", host=host)
        else:
            out.tell(Joiner(number), Refused("no seat is free, and --no-wait was given"))

    def _free(self, unreachable: Collection[WorkerId], now: float) -> list[int]:
        """The ranks of seats that are free, those first that nobody else is about to fill."""
        vacant = sorted(self._vacant.items())
        return [
            *(rank for rank, vacancy in vacant if vacancy.newcomer is None and rank not in self._away),
            *self._gone(unreachable, now),
            *(rank for rank, vacancy in vacant if vacancy.newcomer and not vacancy.come and now < vacancy.due),
        ]

    def joiner_gone(self, number: int) -> None:
        """Notes that a supervisor which has asked for a seat is gone before it got one."""
        self._spares.pop(number, None)

    def _seat(self, number: int, host: str, rank: int, out: CoordinatorOutput) -> None:
        before = self._vacant.get(rank)
        if before is not None and before.newcomer is not None:
            out.fence(before.newcomer, f"host {host} takes its seat")
        self._restarts.admitted(self._together[rank][0])
        self._hosts[rank] = host
        for gone in self._unguarded, self._silent:
            gone.discard(rank)
        self._absent.pop(rank, None)
        out.say("joined", f"host {host} takes {self._names[rank]}", rank=rank, host=host)
        out.tell(Joiner(number), Seated(rank))
        self._start(rank, 0.0, 0.0, out)
        self._start_others(rank, out)

    def _start_others(self, rank: int, out: CoordinatorOutput) -> None:
        """Has those come too that come as one with ``rank``, whose next holder comes from elsewhere, as far as they
        are dead and their own supervisors can start them.
        """
        for other in self._together[rank]:
            waits = other in self._vacant and not self.is_filled(other) and other not in self._away
            here = other not in self._unguarded | self._silent and other not in self._absent
            if waits and here and self._hosts[other] not in self._drained:
                self._start(other, 0.0, 0.0, out)

    # --- leaving as planned, and coming back from there ------------------------------------------

    def stay_away(self, rank: int, out: CoordinatorOutput) -> None:
        """Takes in that whoever holds the seat of ``rank``, or is to, leaves it as planned: nobody follows until it is
        admitted.
        """
        self._away.add(rank)
        self._say_stay(rank, out)

    def _say_stay(self, rank: int, out: CoordinatorOutput) -> None:
        self._staying.add(rank)
        out.tell(SupervisorOf(rank), Stay(rank, incarnation=self._holders[rank]))

    def left(self, worker: WorkerId) -> None:
        """Takes in that a member has left as planned."""
        if worker.incarnation == self._holders.get(worker.rank):
            self._vacant.setdefault(worker.rank, Vacancy())

    def hosted(self, host: str) -> frozenset[int]:
        """The ranks whose processes are started on ``host``.  Costs one look at each rank."""
        return frozenset(rank for rank, its in self._hosts.items() if its == host)

    def host_of(self, rank: int) -> str | None:
        """The host on which the processes of ``rank`` are started; None for a rank that the job does not have."""
        return self._hosts.get(rank)

    def is_drained(self, host: str) -> bool:
        """Whether nobody is to be started on ``host``."""
        return host in self._drained

    @property
    def hosts(self) -> list[str]:
        """The hosts on which processes are started, in order."""
        return sorted(set(self._hosts.values()))

    def hold_back(self, rank: int, why: str, out: CoordinatorOutput) -> None:
        """Ends the newcomer of ``rank``, where there is one that is no member yet, and starts none in its place."""
        if self.is_filled(rank):
            newcomer = self._vacant[rank].newcomer
            assert newcomer is not None, "it is filled"
            out.fence(newcomer, why)
            self._vacant[rank] = Vacancy()
            out.say("held_back", f"{self._names[rank]} was coming back, and stays away: {why}", rank=rank)

    def drain(self, host: str, out: CoordinatorOutput) -> None:
        """Starts nobody on ``host`` from now on, and sends its spares away."""
        self._drained.add(host)
        for rank in sorted(self.hosted(host)):
            self._say_stay(rank, out)
        for number in [number for number, its in self._spares.items() if its == host]:
            del self._spares[number]
            out.tell(Joiner(number), Refused(f"host {host} is drained", code=0))

    def is_vacant(self, rank: int) -> bool:
        """Whether nobody holds the seat of ``rank``, as far as is known for certain."""
        return rank in self._vacant

    def is_filled(self, rank: int) -> bool:
        """Whether a newcomer is to hold the seat of ``rank``, which is vacant."""
        vacancy = self._vacant.get(rank)
        return vacancy is not None and vacancy.newcomer is not None

    def may_follow(self, rank: int) -> bool:
        """Whether another process is to hold the seat of ``rank`` where the newcomer that is to do so dies now."""
        stays = rank in self._away | self._unguarded or self._hosts[rank] in self._drained
        return bool(self._spares) or not (stays or self._restarts.is_last(self._together[rank][0]))

    def due(self, worker: WorkerId) -> float:
        """When its own supervisor starts the newcomer ``worker``, in seconds; 0 where that is not known."""
        return self._vacant[worker.rank].due if self.is_newcomer(worker) else 0.0

    def is_given_up(self, rank: int) -> bool:
        """Whether nobody is to hold the seat of ``rank`` any more, since all who were to have died, one after the
        other, and no spare waits; an operator may think otherwise.
        """
        given_up = self._restarts.has_given_up(self._together[rank][0])
        return self.is_vacant(rank) and not self.is_filled(rank) and given_up and not self._spares

    def admit(self, rank: int, now: float, out: CoordinatorOutput) -> str:
        """Has somebody hold the vacant seat of ``rank`` again, for whom nobody is on the way; returns who that will be,
        in words.
        """
        self._away.discard(rank)
        self._drained.discard(self._hosts[rank])
        self._restarts.admitted(self._together[rank][0])
        if self._spares:
            number = next(iter(self._spares))
            host = self._spares.pop(number)
            self._seat(number, host, rank, out)
            return f"a spare on host {host} takes it"
        if rank in self._unguarded or rank in self._absent or rank in self._silent:
            return f"nobody is left on host {self._hosts[rank]} to start it, and the next that comes by --join takes it"
        self._start(rank, 0.0, now, out)
        return "its supervisor starts it again"

    # --- ending ----------------------------------------------------------------------------------

    def close(self, out: CoordinatorOutput, through: Collection[WorkerId] = ()) -> None:
        """End who has not come so far as to take part, since the job is over.  ``through``: newcomers whose scripts may
        be behind the last step, as the others' were: these end by themselves.
        """
        if self._over:
            return
        self._over = True
        for worker in set(self.newcomers) - {*through}:
            out.tell(SupervisorOf(worker.rank, former=True), Fence(worker.rank, OVER, incarnation=worker.incarnation))
        for number in self._spares:
            out.tell(Joiner(number), Refused(f"{OVER}, and no seat was lost that this spare could have taken", code=0))
        self._spares.clear()
