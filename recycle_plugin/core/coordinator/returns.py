"""Workers that come back: what their messages, and their deaths, lead to.

core/coordinator/facts/joining.py knows how far each newcomer is, core/coordinator/facts/vacancies.py which seats are
free. Nobody waits for a newcomer before it has entered a generation. From then on it is a member, and lost as one.
Newcomers of one unit go as one too: if one dies, the others are ended, and started again with it.
"""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.coordinator import ends, generations, replays
from recycle_plugin.core.coordinator.facts.enrolment import unlike
from recycle_plugin.core.coordinator.facts.joining import COMING, NewcomerRecord, Phase
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import End
from recycle_plugin.core.messages.from_workers import (
    CatchUp,
    CaughtUp,
    Exited,
    Ready,
    Serving,
    SurvivorReport,
)
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.roster import WorkerId


def begin(state: JobState, ready: Ready) -> None:
    """Handle a newcomer's first step, or turn it away if the job is ending or its seat or settings are wrong."""
    if state.is_ending:
        state.tell(ready.worker, End(0, "the job is about to end, and nobody can join it any more", failed=False))
        return
    assert state.job is not None, "a newcomer comes to a job that has started"
    if ready.member.seat != state.attendance.seat_of(ready.member.rank):
        text = f"{ready.member} wants to come back in a seat that belongs to another rank"
        state.say("warning", text, rank=ready.member.rank, seat=str(ready.member.seat))
        state.tell(ready.worker, End(0, text, failed=True))
        return
    if other := unlike(state.job, ready.job):
        text = f"{ready.member} wants to come back with other settings: {other}; start it with those of the job"
        state.say("warning", text, rank=ready.member.rank, seat=str(ready.member.seat))
        state.tell(ready.worker, End(0, text, failed=True))
        return
    newcomer = state.joining.add(ready.member)
    member = newcomer.member
    state.joining.tell_one(newcomer, state.steps.recorded, state.committed, state.places.known(), state.out)
    if state.logs.some:
        state.tell(ready.worker, state.logs.told)
    state.say(
        "newcomer",
        f"{member} on {member.host} comes back, as process {member.incarnation} of its rank; its script runs "
        f"from the top, and the job is at step {state.committed + 1}",
        seat=str(member.seat),
        rank=member.rank,
        incarnation=member.incarnation,
        step=state.committed + 1,
    )


def catch_up(state: JobState, message: CatchUp) -> None:
    """Handle a newcomer's request for its stage's state; it asks again if it has lost all lines."""
    newcomer = state.joining.get(message.worker)
    if newcomer is None or newcomer.phase in (Phase.ENTERED, Phase.REPLAYING, Phase.REPLAYED):
        return
    before = [replace(each) for each in state.joining.with_(newcomer)]
    newcomer.asked = message.number
    _have_served(state, newcomer)
    _call_off(state, before)


def _have_served(state: JobState, newcomer: NewcomerRecord) -> None:
    """Have a newcomer get its stage's state, from other workers or from the logs."""
    if replays.is_awaited(state, newcomer.stage):
        replays.catch_up(state, newcomer)
    else:
        state.joining.catch_up(newcomer, state.roster, state.out)


def see_sources(state: JobState) -> None:
    """Have newcomers without a source served in another way: they may not have heard of that source, and ask nobody."""
    for newcomer in state.joining.see_sources(state.roster):
        if newcomer.awaited_at is None:
            _have_served(state, newcomer)


def serving(state: JobState, message: Serving) -> None:
    """Record that a worker serves a newcomer, and tell the newcomer."""
    if (newcomer := state.joining.get(message.newcomer)) is not None:
        newcomer.came.add(message.worker)
        state.tell(message.newcomer, message)


def caught_up(state: JobState, message: CaughtUp) -> None:
    """Handle that a newcomer follows and asks to take part, or that a replay is done."""
    newcomer = state.joining.get(message.worker)
    if state.replay.is_companion(message.worker):
        replays.accompanied(state, message)
    elif newcomer is not None and newcomer.phase is Phase.REPLAYING:
        replays.replayed(state, newcomer, message)
    elif newcomer is not None and newcomer.phase in COMING:
        if newcomer.awaited_at is not None:  # all others have reported, and it has lost a part of its state
            _call_off(state, state.joining.with_(newcomer))
        first = newcomer.phase is Phase.CATCHING_UP
        state.joining.caught_up(newcomer, message.sources, state.roster, state.committed, state.out)
        if first:
            _say_caught_up(state, newcomer, message)
        generations.plan_change(state)


def _say_caught_up(state: JobState, newcomer: NewcomerRecord, message: CaughtUp) -> None:
    state.say(
        "caught_up",
        f"{newcomer.member} has the state after step {message.step}, and follows",
        seat=str(newcomer.member.seat),
        rank=newcomer.member.rank,
        step=message.step,
        bytes=message.bytes,
        followed_bytes=message.followed,
    )


def enter(state: JobState, message: SurvivorReport) -> None:
    """Record a newcomer's report, by which it may enter its generation; from then on it is waited for like a member. If
    it was called off meanwhile, nobody goes on in that generation, and it will be told of another.
    """
    newcomer = state.joining.get(message.worker)
    if newcomer is None:
        return
    if state.joining.may_enter(newcomer, message.generation, state.roster):
        for each in state.joining.reported(newcomer):
            state.vacancies.entered(each.member.worker)
            state.attendance.failure_detector.observe(each.member.worker)


def come_in_force(state: JobState) -> None:
    """Admit the newcomers that the generation now in force makes members like all, and have others served that wait."""
    for newcomer in state.joining.admitted(state.roster):
        generations.admit(state, newcomer)
    see_sources(state)
    for newcomer in state.joining:
        if newcomer.phase is Phase.WAITING and not replays.is_awaited(state, newcomer.stage):
            _have_served(state, newcomer)


def call_off_late(state: JobState) -> None:
    """Regroup without newcomers that should have entered by now; they follow on, and are announced again."""
    failure_detector = state.attendance.failure_detector
    late = state.joining.late(failure_detector.clock, failure_detector.instruction_s)
    if late and not state.halted:
        seats = dict.fromkeys(str(each.seat) for each in late)
        generations.regroup(state, f"{', '.join(seats)} not back in time")


def turn_down(state: JobState, worker: WorkerId, why: str) -> None:
    """Give up a newcomer that is no member: its process is fenced, and the next one starts as after any death."""
    text = f"{state.attendance.named(worker.rank)} does not come back as process {worker.incarnation}, which is ended"
    state.say("turned_down", f"{text}: {why}", rank=worker.rank, incarnation=worker.incarnation)
    state.attendance.confuse(worker)
    state.fence(worker, why)
    _forget(state, [worker])


def died(state: JobState, message: Exited) -> None:
    """Handle the end of a process that is no member. Nobody has waited for it."""
    with_it = state.vacancies.died(message, state.is_ending, state.now, state.out)
    _forget(state, [message.worker, *with_it])


def lose(state: JobState, newcomer: NewcomerRecord, cause: Cause, how: str) -> None:
    """Take a newcomer and its unit for lost before its generation is in force. Arguments: as :func:`losses.lose`."""
    unit = state.joining.with_(newcomer)
    state.attendance.lose(newcomer.member, cause, how, state.now, state.out)
    for other in unit:
        state.joining.forget(other.member.worker)
        if other is not newcomer:
            why = f"it is given up with {newcomer.member}, which is lost"
            state.fence(other.member.worker, why)
            state.attendance.lose(other.member, Cause.TOGETHER, why, state.now, state.out)
    _call_off(state, unit)


def see_gone(state: JobState) -> None:
    """End newcomers whose host is gone, and newcomers that do nothing."""
    gone = state.vacancies.tick(state.attendance.unreachable, state.is_ending, state.now, state.out)
    for worker in gone:
        _forget(state, [worker])
    detector = state.attendance.failure_detector
    ready = [each.member.worker for each in state.joining]
    replaying = [each.member.worker for each in state.joining if each.phase in (Phase.REPLAYING, Phase.WAITING)]
    for worker, suspicion in detector.late_newcomers(state.vacancies.newcomers, ready, replaying):
        turn_down(state, worker, f"{suspicion} (deadline {suspicion.limit_s:.1f} s)")


def _forget(state: JobState, workers: list[WorkerId]) -> None:
    """Go on without newcomers of one unit, which are gone."""
    newcomers = [newcomer for newcomer in map(state.joining.forget, workers) if newcomer is not None]
    for newcomer in newcomers:
        replays.gone(state, newcomer)
    _call_off(state, newcomers)


def _call_off(state: JobState, unit: list[NewcomerRecord]) -> None:
    """Take newcomers of one ``unit`` that can't enter out of a generation to come. Another planned generation replaces
    it, or one that holds at once if its step may have come.
    """
    announced = [each for each in unit if each.phase in (Phase.ANNOUNCED, Phase.ENTERED)]
    if not announced or state.ending.failed:
        return
    cause = f"{announced[0].seat} not back yet"
    if announced[0].awaited_at is None and not state.regrouping.has_come(state.committed):
        generations.regroup(state, cause, from_step=unstarted(state.committed))
    elif not state.halted:
        gone = {each.member.worker for each in unit}  # if their generation is in force already
        state.attendance.roster = state.roster.without(gone)
        generations.go_on_without(state, cause)


def loaded(state: JobState) -> None:
    """Send newcomers away: all members go on from a checkpoint, whose state newcomers can't reach."""
    ends.send_away(state, "a checkpoint was loaded")
    state.joining.loaded()
