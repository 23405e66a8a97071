"""The course of those who come back: what their messages, and their deaths, lead to for the job.

How far each of them has come core/coordinator/joining.py knows, and whose seat is free core/coordinator/vacancies.py.
Nobody waits for a newcomer before it has entered a generation; from then on it is a member, and lost as one.  Those
that come as one go as one too: where one dies, the others are ended, and started again with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator import ends, replays
from recycle_plugin.core.coordinator.enrolment import unlike
from recycle_plugin.core.coordinator.joining import COMING, NewcomerRecord, Phase
from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.messages.from_coordinator import End
from recycle_plugin.core.messages.from_workers import (
    CatchUp,
    CaughtUp,
    Exited,
    Heartbeat,
    Ready,
    Serving,
    StateHash,
    SupervisorHeartbeat,
    SurvivorReport,
)
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.roster import WorkerId

if TYPE_CHECKING:
    from recycle_plugin.core.coordinator.course import Course


def begin(course: Course, ready: Ready, out: CoordinatorOutput) -> None:
    """Takes in that a newcomer's script has come to its first step."""
    if course.is_ending:
        out.tell(ready.worker, End(0, "the job is about to end, and nobody can join it any more", failed=False))
        return
    assert course.job is not None, "a newcomer comes to a job that has started"
    if ready.member.seat != course.attendance.seat_of(ready.member.rank):
        text = f"{ready.member} wants to come back with a seat that is not its rank's"
        out.say("warning", text, rank=ready.member.rank, seat=str(ready.member.seat))
        out.tell(ready.worker, End(0, text, failed=True))
        return
    if other := unlike(course.job, ready.job):
        text = f"{ready.member} wants to come back with other settings: {other}; start it with those of the job"
        out.say("warning", text, rank=ready.member.rank, seat=str(ready.member.seat))
        out.tell(ready.worker, End(0, text, failed=True))
        return
    member = course.joining.add(ready.member).member
    course.joining.tell(course.steps.recorded, course.committed, course.places.known(), out)
    if course.logs.some:
        out.tell(ready.worker, course.logs.told)
    out.say(
        "newcomer",
        f"{member} on {member.host} comes back, as process {member.incarnation} of its rank; its script runs "
        f"from the top, and the job is at step {course.committed + 1}",
        seat=str(member.seat),
        rank=member.rank,
        incarnation=member.incarnation,
        step=course.committed + 1,
    )


def catch_up(course: Course, message: CatchUp, now: float, out: CoordinatorOutput) -> None:
    """Takes in that a newcomer asks for the state of its stage, again perhaps, since it has lost all lines."""
    newcomer = course.joining.get(message.worker)
    if newcomer is None or newcomer.phase in (Phase.ENTERED, Phase.REPLAYING, Phase.REPLAYED):
        return
    before = [replace(each) for each in course.joining.with_(newcomer)]
    _have_served(course, newcomer, now, out)
    _call_off(course, before, now, out)


def _have_served(course: Course, newcomer: NewcomerRecord, now: float, out: CoordinatorOutput) -> None:
    """Has a newcomer get the state of its stage, from whoever has it by now, or from the logs."""
    if replays.is_awaited(course, newcomer.stage):
        replays.catch_up(course, newcomer, now, out)
    else:
        course.joining.catch_up(newcomer, course.roster, out)


def see_sources(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Has newcomers whose last source is gone get the state in another way: the source may have gone before the
    newcomer has heard of it, and nobody but the coordinator knows then.
    """
    for newcomer in course.joining.see_sources(course.roster):
        if newcomer.awaited_at is None:
            _have_served(course, newcomer, now, out)


def serving(course: Course, message: Serving, out: CoordinatorOutput) -> None:
    """Takes in that a worker serves a newcomer, which is told."""
    if (newcomer := course.joining.get(message.newcomer)) is not None:
        newcomer.came.add(message.worker)
        out.tell(message.newcomer, message)


def caught_up(course: Course, message: CaughtUp, now: float, out: CoordinatorOutput) -> None:
    """Takes in that a newcomer follows, and asks to take part."""
    newcomer = course.joining.get(message.worker)
    if message.worker in course.logs.companions.values():
        replays.accompanied(course, message, now, out)
    elif newcomer is not None and newcomer.phase is Phase.REPLAYING:
        replays.replayed(course, newcomer, message, now, out)
    elif newcomer is not None and newcomer.phase in COMING:
        if newcomer.awaited_at is not None:  # it was compared, and has lost a part of its state since
            _call_off(course, course.joining.with_(newcomer), now, out)
        first = newcomer.phase is Phase.CATCHING_UP
        course.joining.caught_up(newcomer, message.sources, course.roster, course.committed, out)
        if first:
            _say_caught_up(newcomer, message, out)
        course.plan_change(now, out)


def _say_caught_up(newcomer: NewcomerRecord, message: CaughtUp, out: CoordinatorOutput) -> None:
    out.say(
        "caught_up",
        f"{newcomer.member} has the state after step {message.step}, and follows",
        seat=str(newcomer.member.seat),
        rank=newcomer.member.rank,
        step=message.step,
        bytes=message.bytes,
        followed_bytes=message.followed,
    )


def state_hash(course: Course, message: StateHash, now: float, out: CoordinatorOutput) -> None:
    """Takes in the hash of a worker's state that was asked for."""
    newcomer, member = course.joining.get(message.worker), course.roster.member(message.worker)
    seated = newcomer.member if newcomer is not None else member
    if seated is not None:
        course.joining.add_hash(message, seated)
        if compare(course, now, out):
            course.plan_change(now, out)


def compare(course: Course, now: float, out: CoordinatorOutput) -> bool:
    """Gives up whoever differs from the stage's others, a newcomer first of all; returns whether anything has come
    of it, so that newcomers may go on.
    """
    before = course.joining.comparisons
    for mismatch in course.joining.mismatches(course.roster):
        course.act_on_mismatch(mismatch, now, out)
    return course.joining.comparisons < before


def enter(course: Course, message: SurvivorReport, out: CoordinatorOutput) -> None:
    """Notes that a newcomer reports for a generation, and so has entered it; from now on it is waited for.

    Where it was called off meanwhile, nobody goes on in that generation, and it hears of another one.
    """
    newcomer = course.joining.get(message.worker)
    if newcomer is None:
        return
    if course.joining.may_enter(newcomer, message.generation, course.roster):
        for each in course.joining.reported(newcomer):
            course.vacancies.entered(each.member.worker)
            course.attendance.failure_detector.observe(each.member.worker)


def come_in_force(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Says of whom a generation that has come about makes members like all."""
    for newcomer in course.joining.admitted(course.roster):
        admit(course, newcomer, out)
    see_sources(course, now, out)
    for newcomer in course.joining:
        if newcomer.phase is Phase.WAITING and not replays.is_awaited(course, newcomer.stage):
            _have_served(course, newcomer, now, out)


def admit(course: Course, newcomer: NewcomerRecord, out: CoordinatorOutput) -> None:
    """Says of a newcomer that it is a member like all."""
    member = newcomer.member
    course.vacancies.admitted(member.worker, course.committed)
    out.say(
        "rejoined",
        f"{member} has its stage's state after step {course.committed}, the last one, and its script goes on to its end"
        if course.ending.finishing
        else f"{member} takes part again from step {course.committed + 1} on",
        seat=str(member.seat),
        rank=member.rank,
        incarnation=member.incarnation,
        step=course.committed + 1,
    )


def leave_out(course: Course) -> None:
    """Has those follow on, as newcomers, who have entered a generation that does not come in force: it is replaced."""
    for newcomer in course.joining.left_out(course.roster):
        course.vacancies.left_out(newcomer.member.worker)
        course.attendance.failure_detector.dismiss(newcomer.member.worker)


def call_off_late(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Goes on without newcomers that should have entered by now; they follow on, and are announced again."""
    failure_detector = course.attendance.failure_detector
    late = course.joining.late(failure_detector.clock, failure_detector.instruction_s)
    if late and not course.halted:
        seats = dict.fromkeys(str(each.seat) for each in late)
        course.regroup(f"{', '.join(seats)} not back in time", now, out)


def watch(course: Course, message: Heartbeat | SupervisorHeartbeat) -> None:
    """Takes in what a newcomer is at; of others that are no members nothing is kept."""
    if course.vacancies.is_newcomer(message.worker):
        course.newcomer_watch.hear(message, course.attendance.failure_detector.clock)


def turn_down(course: Course, worker: WorkerId, why: str, now: float, out: CoordinatorOutput) -> None:
    """Gives up a newcomer that is no member: its process is ended, and the next one is started as after any death."""
    text = f"{course.attendance.named(worker.rank)} does not come back as process {worker.incarnation}, which is ended"
    out.say("turned_down", f"{text}: {why}", rank=worker.rank, incarnation=worker.incarnation)
    course.attendance.confused.add(worker)
    out.fence(worker, why)
    _forget([worker], course, now, out)


def died(course: Course, message: Exited, now: float, out: CoordinatorOutput) -> None:
    """Takes in that a process which is no member has ended.  Nobody has waited for it."""
    with_it = course.vacancies.died(message, course.is_ending, now, out)
    _forget([message.worker, *with_it], course, now, out)


def lose(course: Course, newcomer: NewcomerRecord, cause: Cause, how: str, at: float, out: CoordinatorOutput) -> None:
    """Takes a newcomer for lost that has reported for a generation which is not in force yet, and all that come as one
    with it; ``cause``, ``how``, ``at``: as core/coordinator/course.py has them.
    """
    unit = course.joining.with_(newcomer)
    course.attendance.lose(newcomer.member, cause, how, at, out)
    for other in unit:
        course.joining.forget(other.member.worker)
        if other is not newcomer:
            why = f"it is given up with {newcomer.member}, which is lost"
            out.fence(other.member.worker, why)
            course.attendance.lose(other.member, Cause.TOGETHER, why, at, out)
    _call_off(course, unit, at, out)


def tick(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Lets time pass, which may show that the host of a newcomer is gone, or that it does nothing."""
    gone = course.vacancies.tick(course.attendance.unreachable, course.is_ending, now, out)
    for worker in gone:
        _forget([worker], course, now, out)
    detector = course.attendance.failure_detector
    limits = detector.instruction_s, detector.deadlines.idle_timeout_s
    replaying = [each.member.worker for each in course.joining if each.phase in (Phase.REPLAYING, Phase.WAITING)]
    for worker, why in course.newcomer_watch.late(course.vacancies.newcomers, replaying, *limits, detector.clock):
        turn_down(course, worker, why, now, out)


def _forget(workers: list[WorkerId], course: Course, now: float, out: CoordinatorOutput) -> None:
    """Goes on without newcomers of one unit, who are gone."""
    newcomers = [newcomer for newcomer in map(course.joining.forget, workers) if newcomer is not None]
    for newcomer in newcomers:
        replays.gone(course, newcomer, now, out)
    _call_off(course, newcomers, now, out)


def _call_off(course: Course, unit: list[NewcomerRecord], now: float, out: CoordinatorOutput) -> None:
    """Takes newcomers of one ``unit`` that can't enter out of a generation to come: by another one to come, or where
    its step may have come, by one that holds at once.
    """
    announced = [each for each in unit if each.phase in (Phase.ANNOUNCED, Phase.ENTERED)]
    if not announced or course.ending.failed:
        return
    cause = f"{announced[0].seat} not back yet"
    if announced[0].awaited_at is None and not course.regrouping.has_come(course.committed):
        course.regroup(cause, now, out, from_step=unstarted(course.committed))
    elif not course.halted:
        gone = {each.member.worker for each in unit}  # where that is in force already
        course.attendance.roster = course.roster.without(gone)
        course.go_on_without(cause, now, out)


def loaded(course: Course, out: CoordinatorOutput) -> None:
    """Takes in that all members go on from a checkpoint, to whose state newcomers can't come."""
    ends.send_away(course, "a checkpoint was loaded", out)
    course.joining.loaded()
