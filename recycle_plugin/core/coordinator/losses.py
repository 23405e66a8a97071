"""Losses: who has died or is given up, and how the others go on.

* A loss takes its failure domain with it.
* If enough are left, they go on at once in a new generation (core/coordinator/generations.py).
* If a stage is empty it is replayed from the logs while all others wait (core/coordinator/replays.py), or the job ends.
* Before the start a loss ends the job. After the last step it may be no loss at all.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import departures, ends, generations, replays, returns
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_workers import Exited, Unguarded
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.roster import Member, WorkerId

EARLY = (
    ": start the job again; if nobody killed it, "
    "look in dmesg on its host whether memory ran out, and give workers more of it, or make the model smaller"
)
GOES_ON = "its script has called os._exit(0), and others train on"


def died(state: JobState, message: Exited) -> None:
    """Handle that a supervisor has seen its worker's process end."""
    if message.worker in state.vanished:
        state.vanished[message.worker] = message
        return
    how = state.attendance.died(message, state.out)
    if state.attendance.is_lost(message.worker) and state.attendance.outnumbered and not state.ending.failed:
        generations.go_on_without(state, f"death of rank {message.rank}")
    lose(state, message.worker, Cause.DIED, how, message.at, by_itself=message.code >= 0)
    if state.attendance.is_lost(message.worker) and state.attendance.started:
        state.vacancies.lost(message, how, state.is_ending, state.now, state.out)


def cut_off(state: JobState, worker: WorkerId, how: str) -> None:
    """Handle that a worker's connection broke without a goodbye, or that its process is ending (``how``). The worker is
    dead, cut off or about to be dead, which is the same for its peers. For workers that are no members, or have
    vanished, the supervisor reports the end.
    """
    if not (state.vacancies.is_outside(worker) or worker in state.vanished):
        lose(state, worker, Cause.DIED, how, state.now)


def unguarded(state: JobState, message: Unguarded) -> None:
    """Record that a rank's guard, the process that the launcher started, was killed. Some launchers end the job for
    that, others go on. Guards of unknown workers are ignored.
    """
    if not _is_known(state, message.worker):
        return
    state.attendance.unguarded(message.worker, message.pid)
    state.vacancies.unguarded(message.worker)
    state.say(
        "unguarded",
        f"the guard of rank {message.rank}, process {message.pid} that the launcher had started, was killed, and "
        "its worker ended with it",
        rank=message.rank,
        pid=message.pid,
    )


def _is_known(state: JobState, worker: WorkerId) -> bool:
    """Return whether ``worker`` takes part, is to, or has."""
    if not state.attendance.started:
        return not worker.incarnation
    has = worker in state.roster.workers or state.attendance.is_lost(worker)
    return has or state.vacancies.is_newcomer(worker)


def give_up(state: JobState, worker: WorkerId, cause: Cause, why: str) -> None:
    """Fence a worker that may be alive, and take it for lost, unless it is gone already."""
    if state.attendance.is_gone(worker):
        return
    state.fence(worker, why)
    lose(state, worker, cause, why, state.now)


def give_up_confused(state: JobState, worker: WorkerId, why: str) -> None:
    """Give up a worker that has sent an impossible message."""
    if state.vacancies.is_outside(worker):
        state.attendance.confuse(worker)
        state.fence(worker, why)  # its supervisor reports its death
    elif not state.ending.failed:
        give_up(state, worker, Cause.CONFUSED, why)


def lose(state: JobState, worker: WorkerId, cause: Cause, how: str, at: float, by_itself: bool = False) -> None:
    """Take a worker for lost. ``at``: when that was seen, seconds. ``by_itself``: its process was not killed."""
    if state.attendance.is_gone(worker) or state.ending.failed:
        return
    member, newcomer = state.roster.member(worker), state.joining.get(worker)
    if not state.attendance.started:
        _lose_before_start(state, worker, how, by_itself)
    elif member is not None:
        _lose_member(state, member, cause, how, at)
    elif newcomer is not None:
        returns.lose(state, newcomer, cause, how)
    else:
        departures.depart(state, worker)


def _lose_before_start(state: JobState, worker: WorkerId, how: str, by_itself: bool) -> None:
    state.attendance.lost_early(worker)
    crash = state.attendance.crash([worker])
    killed = not crash and not by_itself
    what = crash or f"{state.attendance.named(worker.rank)}: {how}"
    ends.end(state, f"{what} before training started{EARLY * killed}", killed=worker.rank if killed else None)


def _lose_member(state: JobState, member: Member, cause: Cause, how: str, at: float) -> None:
    for each in state.attendance.lose(member, cause, how, at, state.out):
        state.joining.forget(each.worker)
        if not state.ending.finishing:
            state.unsaid.setdefault(each.seat.stage, []).append(each)
    if cause is Cause.SILENT:
        state.vacancies.silent(member.rank)
    state.vanished.pop(member.worker, None)
    take_vanished_for_lost(state)
    _go_on_after(state, member)
    returns.see_sources(state)


def _go_on_after(state: JobState, member: Member) -> None:
    """Go on after the loss of ``member`` and its failure domain, or end."""
    state.logs.lost(member)
    state.log_places.ended(member.worker, state.committed)
    if state.ending.finishing and state.attendance.crash([member.worker]):
        state.attendance.through.add(member.seat.stage)  # the job ends with that error
    if state.ending.finishing:
        departures.await_without(state, member, False)
        if _is_missed(state, member):
            replays.go_on_without_stage(state)
    elif ends.empty_stage(state):
        replays.go_on_without_stage(state)
    else:
        generations.go_on_without(state, f"loss of {member.seat}")
    ends.finish_if_empty(state)


def _is_missed(state: JobState, member: Member) -> bool:
    """Return whether no other worker of the stage can do the script's work after the last step."""
    return state.ending.ended is None and member.seat.stage in state.attendance.empty_stages()


def take_vanished_for_lost(state: JobState) -> None:
    """Take all vanished workers for lost (core/coordinator/vanishing.py)."""
    while state.vanished:
        worker, exited = state.vanished.popitem()
        lose(state, worker, Cause.DIED, GOES_ON, state.now, by_itself=True)
        if exited is not None:
            died(state, exited)
