"""Operators' requests: that a seat, or all seats of a host, leave as planned, and that a seat is admitted again. And a
host's own notice that it goes.

* A leave that would empty a stage is refused; for a host, all of it. A host that goes does not ask: if its leave would
  empty a stage, the job ends at the next commit, with a checkpoint. It also ends then if the host is the coordinator's
  and no standby is on another one.
* A worker that has left as planned, and a newcomer of such a seat, stays away until the seat is admitted.
* An admitted seat, which was given up or has left, is taken by a spare, or its own supervisor starts the next process.
  If there is neither, it is free for any joining supervisor.
"""

from __future__ import annotations

from collections.abc import Collection

from recycle_plugin.core.coordinator import departures, ends
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, Answer
from recycle_plugin.core.messages.from_operators import Ask, AskAdmit, AskDrain, AskLeave
from recycle_plugin.core.messages.from_workers import HostGoes, Leaving
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member


def answer(state: JobState, request: Ask) -> Answer:
    """Do what an operator asks for, and report it, or answer why it can't be done. TypeError if it is no request."""
    match request:
        case AskLeave():
            what, said = f"leave {request.seat}", _leave(state, request.seat)
        case AskDrain():
            what, said = f"drain {request.host}", _drain(state, request.host)
        case AskAdmit():
            what, said = f"admit {request.seat}", _admit(state, request.seat)
        case _:
            raise TypeError(f"{type(request).__name__} is no request")
    state.say("operator", f"recycle {what}: {said.text}", request=what, done=said.done)
    return said


def _leave(state: JobState, name: str) -> Answer:
    if why := _not_now(state) or _no_seat(state, name):
        return Answer(why, False)
    ranks = state.attendance.ranks(Seat.parse(name))
    members = state.roster.of_ranks(ranks)
    if why := _cannot_go(state, members):
        return Answer(why, False)
    if members:
        return _go(state, members, f"recycle leave {name}")
    coming = [rank for rank in sorted(ranks) if state.vacancies.is_filled(rank)]
    for rank in coming:
        state.vacancies.stay_away(rank, state.out)
        state.vacancies.hold_back(rank, f"recycle leave {name}", state.out)
    if coming:
        return Answer(f"seat {name} was coming back, and stays away", True)
    return Answer(f"no worker holds seat {name}: it is lost, or has left", False)


def _drain(state: JobState, host: str) -> Answer:
    if why := _not_now(state):
        return Answer(why, False)
    if not state.vacancies.hosted(host):
        return Answer(f"no seat is on host {host}: the job's are on {', '.join(state.vacancies.hosts)}", False)
    members = _there(state, host)
    if why := _cannot_go(state, members):
        return Answer(why, False)
    _start_nobody(state, host, f"host {host} is drained")
    if not members:
        return Answer(f"no worker is left on host {host}, and none is started there", True)
    return _go(state, members, f"host {host} is drained")


def host_goes(state: JobState, message: HostGoes) -> None:
    """Let all on the host of ``message``'s worker leave, and start nobody there; end the job if it can't go on without
    them. Workers that are just being let in leave when the message is repeated. Costs one look at each rank.
    """
    host = state.vacancies.host_of(message.rank)
    if _not_now(state) or host is None:
        return
    why = f"host {host} is to be taken away: {message.reason}"
    if not state.vacancies.is_drained(host):
        state.say("notice", why, host=host)
        _start_nobody(state, host, why)
    if message.coordinator and not state.stood_by_elsewhere:
        ends.end_planned(state, f"{why}. The coordinator runs there", TRY_AGAIN)
    elif members := [each for each in _there(state, host) if state.joining.get(each.worker) is None]:
        departures.leave(state, [Leaving(each.rank, why, incarnation=each.incarnation) for each in members])


def _there(state: JobState, host: str) -> tuple[Member, ...]:
    """Return the members on ``host``, and those that leave with them."""
    there = state.roster.of_ranks(state.vacancies.hosted(host))
    return tuple(dict.fromkeys(one for member in there for one in state.attendance.together(member)))


def _start_nobody(state: JobState, host: str, why: str) -> None:
    state.vacancies.drain(host, state.out)
    for rank in sorted(state.vacancies.hosted(host)):
        state.vacancies.hold_back(rank, why, state.out)


def _admit(state: JobState, name: str) -> Answer:
    if why := _not_now(state) or _no_seat(state, name):
        return Answer(why, False)
    ranks, vacancies = state.attendance.ranks(Seat.parse(name)), state.vacancies
    for member in state.roster.of_ranks(ranks):
        how = "is leaving: admit it once it has left" if state.attendance.is_leaving(member.worker) else "is live"
        return Answer(f"{member} {how}", False)
    if not all(map(vacancies.is_vacant, ranks)):
        return Answer(
            f"seat {name} is lost, but its process may still run; once that has ended, the seat can be admitted", False
        )
    wanted = [rank for rank in sorted(ranks) if not vacancies.is_filled(rank)]
    if not wanted:
        return Answer(f"seat {name} is coming back already", False)
    return Answer(f"seat {name}: {'; '.join([vacancies.admit(rank, state.now, state.out) for rank in wanted])}", True)


def _not_now(state: JobState) -> str:
    """Return why nothing can be asked for now, else ""."""
    if not state.attendance.started:
        return "training has not started yet"
    return "the job is about to end, or is over" if state.is_ending else ""


def _no_seat(state: JobState, name: str) -> str:
    """Return why ``name`` is no seat of the job, else ""."""
    seats = [str(seat) for seat in state.attendance.seats]
    return "" if name in seats else f"there is no seat {name}: this job has {', '.join(seats)}"


def _cannot_go(state: JobState, members: Collection[Member]) -> str:
    """Return why ``members`` can't leave, else ""."""
    for member in members:
        if state.joining.get(member.worker) is not None:
            return f"{member} is being admitted: ask again in a moment, once it takes part"
    attendance = state.attendance
    empty = attendance.empty_in(attendance.staying.without({member.worker for member in members}))
    return f"stage {empty[0]} would have no worker left" if members and empty else ""


def _go(state: JobState, members: Collection[Member], why: str) -> Answer:
    departures.leave(state, [Leaving(member.rank, why, incarnation=member.incarnation) for member in members])
    who = " and ".join(map(str, members))
    return Answer(f"{who} leave{'s' * (len(members) == 1)} at the next commit", True)
