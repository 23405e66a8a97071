"""An operator's requests: that a seat, or all seats of a host, leave as planned, and that somebody holds a seat again.
And a host's own notice that it goes.

* A leave that would leave a stage without a worker is refused, and of a host then all of it.  A host that goes does not
  ask: then the job ends at the commit, with a checkpoint, as it does where it is the coordinator's, and nobody stands
  by on another one.
* Who has left as planned stays away until its seat is admitted.  Who was coming back there does not.
* A seat that was given up, or has left, is admitted: a spare takes it, or its own supervisor starts the next process;
  where neither is there, it is free for whoever comes.
"""

from __future__ import annotations

from collections.abc import Collection

from recycle_plugin.core.coordinator import departures, ends
from recycle_plugin.core.coordinator.course import Course
from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, Answer
from recycle_plugin.core.messages.from_operators import Ask, AskAdmit, AskDrain, AskLeave
from recycle_plugin.core.messages.from_workers import HostGoes, Leaving
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member


def answer(request: Ask, course: Course, now: float, out: CoordinatorOutput) -> Answer:
    """Does what an operator asks for, and says it to the user, or says why it can't be done.  ``now``: in seconds."""
    match request:
        case AskLeave():
            what, said = f"leave {request.seat}", _leave(request.seat, course, now, out)
        case AskDrain():
            what, said = f"drain {request.host}", _drain(request.host, course, now, out)
        case AskAdmit():
            what, said = f"admit {request.seat}", _admit(request.seat, course, now, out)
        case _:
            raise TypeError(f"{type(request).__name__} is no request")
    out.say("operator", f"recycle {what}: {said.text}", request=what, done=said.done)
    return said


def _leave(name: str, course: Course, now: float, out: CoordinatorOutput) -> Answer:
    if why := _not_now(course) or _no_seat(name, course):
        return Answer(why, False)
    ranks = course.attendance.ranks(Seat.parse(name))
    members = course.roster.of_ranks(ranks)
    if why := _cannot_go(members, course):
        return Answer(why, False)
    if members:
        return _go(members, f"recycle leave {name}", course, now, out)
    coming = [rank for rank in sorted(ranks) if course.vacancies.is_filled(rank)]
    for rank in coming:
        course.vacancies.stay_away(rank, out)
        course.vacancies.hold_back(rank, f"recycle leave {name}", out)
    if coming:
        return Answer(f"seat {name} was coming back, and stays away", True)
    return Answer(f"nobody holds seat {name}: it is lost, or has left", False)


def _drain(host: str, course: Course, now: float, out: CoordinatorOutput) -> Answer:
    if why := _not_now(course):
        return Answer(why, False)
    if not course.vacancies.hosted(host):
        return Answer(f"no seat is on host {host}: the job's are on {', '.join(course.vacancies.hosts)}", False)
    members = _there(host, course)
    if why := _cannot_go(members, course):
        return Answer(why, False)
    _start_nobody(host, f"host {host} is drained", course, out)
    if not members:
        return Answer(f"nobody is left on host {host}, and nobody is started there", True)
    return _go(members, f"host {host} is drained", course, now, out)


def host_goes(course: Course, message: HostGoes, now: float, out: CoordinatorOutput) -> None:
    """Has all leave that are on the host of ``message``'s worker, and starts nobody there; ends the job where it can't
    go on without.  Whoever is just being let in goes when this is said again.  Costs one look at each rank.
    """
    host = course.vacancies.host_of(message.rank)
    if _not_now(course) or host is None:
        return
    why = f"host {host} is to be taken away: {message.reason}"
    if not course.vacancies.is_drained(host):
        out.say("notice", why, host=host)
        _start_nobody(host, why, course, out)
    if message.coordinator and not course.stood_by_elsewhere:
        ends.end_planned(course, f"{why}. The coordinator is there", out, TRY_AGAIN)
    elif members := [each for each in _there(host, course) if course.joining.get(each.worker) is None]:
        departures.leave(course, [Leaving(each.rank, why, incarnation=each.incarnation) for each in members], now, out)


def _there(host: str, course: Course) -> tuple[Member, ...]:
    """The members on ``host``, and those that leave with them."""
    there = course.roster.of_ranks(course.vacancies.hosted(host))
    return tuple(dict.fromkeys(one for member in there for one in course.attendance.together(member)))


def _start_nobody(host: str, why: str, course: Course, out: CoordinatorOutput) -> None:
    course.vacancies.drain(host, out)
    for rank in sorted(course.vacancies.hosted(host)):
        course.vacancies.hold_back(rank, why, out)


def _admit(name: str, course: Course, now: float, out: CoordinatorOutput) -> Answer:
    if why := _not_now(course) or _no_seat(name, course):
        return Answer(why, False)
    ranks, vacancies = course.attendance.ranks(Seat.parse(name)), course.vacancies
    for member in course.roster.of_ranks(ranks):
        how = "is leaving: admit it once it has left" if member.worker in course.attendance.leaving else "is live"
        return Answer(f"{member} {how}", False)
    if not all(map(vacancies.is_vacant, ranks)):
        return Answer(
            f"seat {name} is lost, and nobody has seen its process end; once it has, it can be admitted", False
        )
    wanted = [rank for rank in sorted(ranks) if not vacancies.is_filled(rank)]
    if not wanted:
        return Answer(f"seat {name} is coming back already", False)
    return Answer(f"seat {name}: {'; '.join([vacancies.admit(rank, now, out) for rank in wanted])}", True)


def _not_now(course: Course) -> str:
    """The reason why nothing can be asked for now; else empty."""
    if not course.attendance.started:
        return "training has not started yet"
    return "the job is about to end, or is over" if course.is_ending else ""


def _no_seat(name: str, course: Course) -> str:
    """The reason why ``name`` is no seat of the job's; else empty."""
    seats = [str(seat) for seat in course.attendance.seats]
    return "" if name in seats else f"there is no seat {name}: this job has {', '.join(seats)}"


def _cannot_go(members: Collection[Member], course: Course) -> str:
    """The reason why ``members`` can't leave; else empty."""
    for member in members:
        if course.joining.get(member.worker) is not None:
            return f"{member} is being let in: ask again in a moment, once it takes part"
    attendance = course.attendance
    empty = attendance.view(attendance.staying.without({member.worker for member in members})).empty_stages()
    return f"stage {empty[0]} would have nobody left" if members and empty else ""


def _go(members: Collection[Member], why: str, course: Course, now: float, out: CoordinatorOutput) -> Answer:
    departures.leave(
        course, [Leaving(member.rank, why, incarnation=member.incarnation) for member in members], now, out
    )
    who = " and ".join(map(str, members))
    return Answer(f"{who} leave{'s' * (len(members) == 1)} at the next commit", True)
