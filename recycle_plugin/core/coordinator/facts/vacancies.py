"""The seats of lost workers, and who holds them next: a *newcomer*, the next process of the same rank.

* A seat is vacant once its worker is known to be dead: a supervisor has seen the process end. A waiting spare takes it,
  else its own supervisor starts the next process as core/coordinator/facts/restarts.py decides.
* A supervisor from elsewhere (``--join``) gets a vacant seat, or a seat of a lost host. It gets a seat that another
  supervisor is about to fill only if no other is free. Else it waits as a *spare*.
* A worker that leaves as planned stays away, and its supervisor stays, until an operator admits the seat again
  (core/coordinator/operating.py). Until then nobody takes the seat. Nobody is started on a drained host.
* Each newcomer has an unused incarnation. Until it is admitted it is no member, and nothing that it does costs the
  others anything. If it dies, the seat is vacant again.
* Workers that are given up as one (the shards of a seat, or the workers of a replica) come together. If one dies the
  others are ended, and when all are dead, all are started at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, Joiner, SupervisorOf
from recycle_plugin.core.coordinator.facts.restarts import Restarts
from recycle_plugin.core.coordinator.facts.seats import SeatRecord, Vacancy
from recycle_plugin.core.messages.from_coordinator import Fence, Refused, Restart, Seated, Stay
from recycle_plugin.core.messages.from_workers import Exited
from recycle_plugin.core.vocabulary.describe import how_ended
from recycle_plugin.core.vocabulary.roster import WorkerId

OVER = "the job is over"


class Vacancies:
    """The seats of a job of ``ranks`` ranks, the spares that wait for one, and the current process of each rank."""

    def __init__(self, ranks: int) -> None:
        self._seats = {rank: SeatRecord(rank) for rank in range(ranks)}
        self._open: set[int] = set()  # ranks whose seats are vacant
        self._restarts = Restarts()
        self._started = False
        self._absent_s = 0.0  # how long a supervisor may be gone before its host counts as gone
        self._members: set[WorkerId] = set()  # past and present ones
        # members with whom no step was committed yet: the step after which they got work
        self._unproven: dict[WorkerId, int | None] = {}
        self._spares: dict[int, str] = {}  # by number, the host
        self._drained: set[str] = set()  # hosts
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
        """Start with ``workers`` as members. ``names``, ``hosts``: of all ranks. ``units``: the ranks that come as one.
        ``absent_s``: after how many seconds without a supervisor its host counts as gone.
        """
        self._restarts, self._started, self._absent_s = Restarts(rejoin), True, absent_s
        self._members = set(workers)
        for unit in units:
            for rank in unit:
                self._seats[rank].unit = unit
        for worker in workers:
            seat = self._seats[worker.rank]
            seat.name, seat.host, seat.holder = names[worker.rank], hosts[worker.rank], worker.incarnation

    # --- who is who ------------------------------------------------------------------------------

    def identify(self, claimed: WorkerId) -> WorkerId:
        """Return the identity of a process: ``claimed`` if it is the first of its rank or asked for, else a new one."""
        seat = self._seats[claimed.rank]
        first = not claimed.incarnation and seat.newest is None
        number = claimed.incarnation if first or seat.awaits(claimed) else seat.unused
        seat.newest = max(number, seat.newest or 0)
        return WorkerId(claimed.rank, number)

    def is_newcomer(self, worker: WorkerId) -> bool:
        """Return whether ``worker`` is to hold a vacant seat, and is no member yet."""
        seat = self._seats.get(worker.rank)
        return seat is not None and seat.is_for(worker)

    def is_outside(self, worker: WorkerId) -> bool:
        """Return whether the job has started and ``worker`` has never been a member."""
        return self._started and worker not in self._members

    @property
    def _vacant(self) -> list[SeatRecord]:
        return [self._seats[rank] for rank in sorted(self._open)]

    def _vacate(self, seat: SeatRecord, vacancy: Vacancy) -> None:
        seat.vacancy = vacancy
        self._open.add(seat.rank)

    @property
    def empty(self) -> frozenset[int]:
        """The ranks that are vacant and whose newcomer, if any, has not connected."""
        return frozenset(seat.rank for seat in self._vacant if seat.vacancy is not None and not seat.vacancy.come)

    @property
    def newcomers(self) -> tuple[WorkerId, ...]:
        """All newcomers, connected or not."""
        return tuple(
            seat.vacancy.newcomer for seat in self._vacant if seat.vacancy and seat.vacancy.newcomer is not None
        )

    @property
    def has_spares(self) -> bool:
        return bool(self._spares)

    # --- vacant, and filled again ----------------------------------------------------------------

    def lost(self, message: Exited, how: str, ending: bool, now: float, out: CoordinatorOutput) -> None:
        """Handle the death of a lost member, ``how`` in words: have its seat filled. Once for each member."""
        worker, seat = message.worker, self._seats[message.rank]
        if seat.vacancy is not None or worker.incarnation != seat.holder:
            return
        seat.silent = False  # its supervisor was heard just now
        in_vain = worker in self._unproven
        self._unproven.pop(worker, None)
        self._goes_with(message)
        self._vacate(seat, Vacancy(before=worker, how=how, in_vain=in_vain))
        self._fill(seat, ending, now, out)

    def died(self, message: Exited, ending: bool, now: float, out: CoordinatorOutput) -> list[WorkerId]:
        """Handle the end of a process that is no member. Return the newcomers that are ended with it. If its host was
        taken for gone, that is heard of again, and starts the next process.
        """
        seat = self._seats[message.rank]
        if not self.is_newcomer(message.worker):
            if seat.silent and seat.vacancy is not None and seat.vacancy.before == message.worker:
                seat.silent = False
                self._goes_with(message)
                self._fill(seat, ending, now, out)
            return []
        self._goes_with(message)
        return self._in_vain(message.worker, f"its process {how_ended(message.code)}", ending, now, out)

    def _goes_with(self, message: Exited) -> None:
        """Record that a supervisor goes when its worker exits with code 0, unless the worker leaves as planned."""
        seat = self._seats[message.rank]
        if message.code == 0 and not seat.away:
            seat.unguarded = True

    def _in_vain(self, worker: WorkerId, how: str, ending: bool, now: float, out: CoordinatorOutput) -> list[WorkerId]:
        """Handle the end of a newcomer: fence the others of its unit, and return them."""
        seat = self._seats[worker.rank]
        self._vacate(seat, Vacancy(before=worker, how=how, in_vain=True))
        ended = []
        for other in self._unit(seat):
            if other.vacancy is None or (newcomer := other.vacancy.newcomer) is None:
                continue
            ended.append(newcomer)
            why = f"it is ended with {seat.name}, which was to join with it: {how}"
            out.fence(newcomer, why)
            if not other.vacancy.come:  # it may never start, and then its end is never reported
                self._vacate(other, Vacancy(before=newcomer, how=why, in_vain=True))
        self._fill(seat, ending, now, out)
        return ended

    def _unit(self, seat: SeatRecord) -> list[SeatRecord]:
        """Return the seats that come back together with ``seat``, itself included."""
        return [self._seats[rank] for rank in seat.unit]

    def _fill(self, seat: SeatRecord, ending: bool, now: float, out: CoordinatorOutput) -> None:
        """Fill a unit's seats, once all their holders are dead."""
        unit = self._unit(seat)
        vacancies = [each.vacancy for each in unit if each.vacancy is not None and each.vacancy.newcomer is None]
        if len(vacancies) < len(unit):
            return
        if any(each.in_vain for each in vacancies):
            self._restarts.in_vain(seat.unit[0])
        for vacancy in vacancies:
            vacancy.in_vain = False
        for each in unit:
            if not each.away and self._spares and not ending:
                self._seat_spare(each, now, out)
        self._start_all([each for each in unit if not each.is_filled], ending, now, out)

    def _start_all(self, seats: Collection[SeatRecord], ending: bool, now: float, out: CoordinatorOutput) -> None:
        """Have the supervisors of ``seats``, of one unit, start its next holders, unless one of them can't."""
        if any(seat.away or seat.host in self._drained for seat in seats):
            return
        unguarded = any(seat.unguarded or seat.silent for seat in seats)
        for seat in seats:
            assert seat.vacancy is not None and seat.vacancy.before is not None, "a worker has held it"
            before, how = seat.vacancy.before, seat.vacancy.how
            after_s = self._restarts.decide(before, seat.name, how, ending, unguarded, out, seat.unit[0])
            if after_s is not None:
                self._start(seat, after_s, now, out)

    def _start(self, seat: SeatRecord, after_s: float, now: float, out: CoordinatorOutput) -> None:
        number = seat.unused
        seat.staying = False
        seat.holder = seat.newest = number
        self._vacate(seat, Vacancy(WorkerId(seat.rank, number), now + after_s))
        out.tell(SupervisorOf(seat.rank), Restart(seat.rank, after_s, incarnation=number))

    def come(self, worker: WorkerId) -> bool:
        """Record that ``worker`` has connected. Return whether it was asked for."""
        vacancy = self._seats[worker.rank].vacancy
        if vacancy is None or vacancy.newcomer != worker or vacancy.come:
            return False
        vacancy.come = True
        return True

    def entered(self, worker: WorkerId) -> None:
        """Make a newcomer a member. Its seat is filled; if it is lost before it is admitted, it has come in vain."""
        self._seats[worker.rank].vacancy = None
        self._open.discard(worker.rank)
        self._members.add(worker)
        self._unproven[worker] = None

    def left_out(self, worker: WorkerId) -> None:
        """Make a member that has entered a newcomer again; it waits for another generation."""
        self._members.discard(worker)
        self._unproven.pop(worker, None)
        self._vacate(self._seats[worker.rank], Vacancy(worker, come=True))

    def admitted(self, worker: WorkerId, committed: int) -> None:
        """Record that a newcomer has become a member like all, after step ``committed``."""
        if worker in self._unproven:
            self._unproven[worker] = committed

    def committed(self, step: int) -> None:
        """Record a commit: members that had work in the step before have not come in vain. O(members since then)."""
        proven = [worker for worker, behind in self._unproven.items() if behind is not None and step > behind + 1]
        for worker in proven:
            del self._unproven[worker]
            self._restarts.admitted(self._seats[worker.rank].unit[0])

    # --- supervisors, and hosts that are gone ----------------------------------------------------

    def supervised(self, rank: int, now: float, out: CoordinatorOutput) -> None:
        """Handle that the supervisor of ``rank`` has connected, perhaps again: it may have missed an order to start a
        process.
        """
        seat = self._seats[rank]
        seat.absent_since, seat.silent = None, False
        if seat.staying:
            self._say_stay(seat, out)
        vacancy = seat.vacancy
        if vacancy is not None and vacancy.newcomer is not None and not vacancy.come:
            vacancy.due = max(vacancy.due, now)
            order = Restart(rank, vacancy.due - now, incarnation=vacancy.newcomer.incarnation)
            out.tell(SupervisorOf(rank), order)

    def unsupervised(self, rank: int, now: float) -> None:
        """Record that the supervisor of ``rank`` is gone; another may come."""
        self._seats[rank].absent_since = now

    def heard(self, worker: WorkerId, now: float) -> None:
        """Record that the supervisor of ``worker`` has reported its process."""
        seat = self._seats[worker.rank]
        if seat.is_for(worker) and seat.vacancy is not None:
            seat.vacancy.heard = now

    def silent(self, rank: int) -> None:
        """Record that the host of ``rank`` is silent."""
        self._seats[rank].silent = True

    def unguarded(self, worker: WorkerId) -> None:
        """Record that the guard of ``worker`` is gone: nobody is left there to start another process."""
        seat = self._seats[worker.rank]
        if worker.incarnation == seat.holder:
            seat.unguarded = True

    def tick(
        self, unreachable: Collection[WorkerId], ending: bool, now: float, out: CoordinatorOutput
    ) -> list[WorkerId]:
        """Let time pass; return newcomers that go with their hosts. ``unreachable``: lost and not known to be dead.
        O(vacant seats + absent supervisors).
        """
        gone: list[WorkerId] = []
        for worker in self.newcomers:
            if self.is_host_gone(worker.rank, now) or self._is_silent(worker.rank, now):
                self._seats[worker.rank].silent = True
                out.fence(worker, "its host is gone")
                gone += [worker, *self._in_vain(worker, "its host is gone", ending, now, out)]
        while self._spares and not ending and (ranks := self._gone(unreachable, now)):
            self._seat_spare(self._seats[ranks[0]], now, out)
        return gone

    def is_host_gone(self, rank: int, now: float) -> bool:
        """Return whether the host on which the processes of ``rank`` start is gone, or as good as gone."""
        seat = self._seats[rank]
        return seat.silent or (seat.absent_since is not None and now - seat.absent_since > self._absent_s)

    def _is_silent(self, rank: int, now: float) -> bool:
        """Return whether the supervisor of ``rank`` has not reported its newcomer's process for too long: a host that
        loses power breaks no connection, also before that process is started.
        """
        seat = self._seats[rank]
        if seat.vacancy is None:
            return False
        heard = seat.vacancy.heard
        if heard is None and not seat.vacancy.come and seat.absent_since is None:
            heard = seat.vacancy.due
        return heard is not None and now - heard > self._absent_s

    def _gone(self, unreachable: Collection[WorkerId], now: float) -> list[int]:
        """Return the ranks of lost workers whose hosts are gone and that no newcomer replaces yet."""
        return sorted(
            rank
            for rank, incarnation in unreachable
            if (seat := self._seats[rank]).vacancy is None
            and incarnation == seat.holder
            and self.is_host_gone(rank, now)
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
        """Give a supervisor on ``host`` a free seat. If there is none, keep a spare that ``waits``, else refuse."""
        if ending or self._over:
            out.tell(Joiner(number), Refused(OVER if self._over else "the job is about to end"))
        elif free := self._free(unreachable, now):
            self._seat(number, host, self._seats[free[0]], now, out)
        elif waits:
            self._spares[number] = host
            out.say(
                "spare", f"a process on host {host} waits as a spare, and takes the next seat that is lost", host=host
            )
        else:
            out.tell(Joiner(number), Refused("no seat is free, and --no-wait was given"))

    def _free(self, unreachable: Collection[WorkerId], now: float) -> list[int]:
        """Return the ranks of free seats; first those that nobody else is about to fill."""
        vacant = [(seat, seat.vacancy) for seat in self._vacant if seat.vacancy is not None]
        return [
            *(seat.rank for seat, its in vacant if its.newcomer is None and not seat.away),
            *self._gone(unreachable, now),
            *(seat.rank for seat, its in vacant if its.newcomer and not its.come and now < its.due),
        ]

    def joiner_gone(self, number: int) -> None:
        """Drop the spare ``number``, whose supervisor is gone."""
        self._spares.pop(number, None)

    def _seat_spare(self, seat: SeatRecord, now: float, out: CoordinatorOutput) -> str:
        """Give ``seat`` to the spare that has waited longest. Return its host."""
        number = next(iter(self._spares))
        host = self._spares.pop(number)
        self._seat(number, host, seat, now, out)
        return host

    def _seat(self, number: int, host: str, seat: SeatRecord, now: float, out: CoordinatorOutput) -> None:
        if seat.vacancy is not None and seat.vacancy.newcomer is not None:
            out.fence(seat.vacancy.newcomer, f"host {host} takes its seat")
        self._restarts.admitted(seat.unit[0])
        seat.host, seat.absent_since = host, None
        seat.unguarded = seat.silent = False
        out.say("joined", f"a process on host {host} takes {seat.name}", rank=seat.rank, host=host)
        out.tell(Joiner(number), Seated(seat.rank))
        self._start(seat, 0.0, now, out)
        self._start_others(seat, now, out)

    def _start_others(self, seat: SeatRecord, now: float, out: CoordinatorOutput) -> None:
        """Start the dead others of the unit of ``seat``, which is filled from elsewhere, if their supervisors can."""
        for other in self._unit(seat):
            waits = other.vacancy is not None and not other.is_filled and not other.away
            if waits and other.has_starter and other.host not in self._drained:
                self._start(other, 0.0, now, out)

    # --- leaving as planned, and coming back from there ------------------------------------------

    def stay_away(self, rank: int, out: CoordinatorOutput) -> None:
        """Handle that the holder of the seat of ``rank`` leaves as planned: nobody follows before an admission."""
        self._seats[rank].away = True
        self._say_stay(self._seats[rank], out)

    def _say_stay(self, seat: SeatRecord, out: CoordinatorOutput) -> None:
        assert seat.holder is not None, "a worker holds it, or has held it"
        seat.staying = True
        out.tell(SupervisorOf(seat.rank), Stay(seat.rank, incarnation=seat.holder))

    def left(self, worker: WorkerId) -> None:
        """Record that a member has left as planned."""
        seat = self._seats[worker.rank]
        if worker.incarnation == seat.holder and seat.vacancy is None:
            self._vacate(seat, Vacancy())

    def hosted(self, host: str) -> frozenset[int]:
        """Return the ranks whose processes start on ``host``. O(ranks)."""
        return frozenset(seat.rank for seat in self._seats.values() if seat.host == host)

    def host_of(self, rank: int) -> str | None:
        """Return the host on which the processes of ``rank`` start; None if the job has no such rank."""
        seat = self._seats.get(rank)
        return seat.host if seat is not None else None

    def is_drained(self, host: str) -> bool:
        """Return whether nobody is to be started on ``host``."""
        return host in self._drained

    @property
    def hosts(self) -> list[str]:
        """The hosts on which processes start, in order."""
        return sorted({seat.host for seat in self._seats.values()})

    def hold_back(self, rank: int, why: str, out: CoordinatorOutput) -> None:
        """End the newcomer of ``rank`` if it is no member yet, and start none in its place."""
        seat = self._seats[rank]
        if seat.vacancy is not None and seat.vacancy.newcomer is not None:
            out.fence(seat.vacancy.newcomer, why)
            self._vacate(seat, Vacancy())
            out.say("held_back", f"{seat.name} was coming back, and stays away: {why}", rank=rank)

    def drain(self, host: str, out: CoordinatorOutput) -> None:
        """Start nobody on ``host`` from now on, and send its spares away."""
        self._drained.add(host)
        for rank in sorted(self.hosted(host)):
            self._say_stay(self._seats[rank], out)
        for number in [number for number, its in self._spares.items() if its == host]:
            del self._spares[number]
            out.tell(Joiner(number), Refused(f"host {host} is drained", code=0))

    def is_vacant(self, rank: int) -> bool:
        """Return whether the seat of ``rank`` certainly has no holder."""
        return self._seats[rank].vacancy is not None

    def is_filled(self, rank: int) -> bool:
        """Return whether the seat of ``rank`` is vacant and a newcomer is to hold it."""
        return self._seats[rank].is_filled

    def may_follow(self, rank: int) -> bool:
        """Return whether another process is to hold the seat of ``rank`` if its newcomer dies now."""
        seat = self._seats[rank]
        stays = seat.away or seat.unguarded or seat.host in self._drained
        return bool(self._spares) or not (stays or self._restarts.is_last(seat.unit[0]))

    def due(self, worker: WorkerId) -> float:
        """Return when its supervisor starts the newcomer ``worker``, in seconds; 0 if not known."""
        vacancy = self._seats[worker.rank].vacancy
        return vacancy.due if vacancy is not None and vacancy.newcomer == worker else 0.0

    def is_given_up(self, rank: int) -> bool:
        """Return whether too many newcomers of ``rank`` died in a row and no spare waits; only an operator can help."""
        seat = self._seats[rank]
        given_up = self._restarts.has_given_up(seat.unit[0])
        return seat.vacancy is not None and not seat.is_filled and given_up and not self._spares

    def admit(self, rank: int, now: float, out: CoordinatorOutput) -> str:
        """Fill the vacant seat of ``rank``, for which no process is coming. Return the process that will hold it, in
        words.
        """
        seat = self._seats[rank]
        seat.away = False
        self._drained.discard(seat.host)
        self._restarts.admitted(seat.unit[0])
        if self._spares:
            return f"a spare on host {self._seat_spare(seat, now, out)} takes it"
        if not seat.has_starter:
            return f"no process is left on host {seat.host} to start it: the next one started with --join takes it"
        self._start(seat, 0.0, now, out)
        return "its supervisor starts it again"

    # --- ending ----------------------------------------------------------------------------------

    def close(self, out: CoordinatorOutput, through: Collection[WorkerId] = ()) -> None:
        """End newcomers and spares: the job is over. ``through``: newcomers that may be past the end, and end by
        themselves.
        """
        if self._over:
            return
        self._over = True
        for worker in set(self.newcomers) - {*through}:
            out.tell(SupervisorOf(worker.rank, former=True), Fence(worker.rank, OVER, incarnation=worker.incarnation))
        for number in self._spares:
            out.tell(Joiner(number), Refused(f"{OVER}, and no seat was lost that this spare could have taken", code=0))
        self._spares.clear()
