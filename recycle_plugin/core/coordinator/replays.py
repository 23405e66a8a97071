"""Empty stages that are replayed from the logs of the others (SWIFT, PPoPP'23, section 5).

With a log (core/worker/step_log.py) the loss of a stage's last worker does not end the job. A generation without the
stage is published, in which all stop between two instructions and keep what they have. A newcomer loads the stage's
state from the last durable checkpoint and replays the steps committed since (core/worker/replay.py). Then it is a
member at once, and begun steps are finished by lineage, as after any loss.

What a neighbour has sent to that stage may be in no readable log: its boundary is not logged, a disk was full, a file
is damaged. Then a live worker of the neighbour, a *companion*, replays along (core/worker/companion.py). If what a
companion needs can't be read either, the next stage's worker does too, up to the whole pipeline.

This module knows whether a stage can be replayed and with whom. core/coordinator/recovery_ways.py reports the way.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import ends, generations, goodbyes, replay_deadlines, replayable
from recycle_plugin.core.coordinator.facts.joining import NewcomerRecord, Phase
from recycle_plugin.core.coordinator.facts.output import WORKERS
from recycle_plugin.core.coordinator.facts.replay_under_way import ReplayUnderWay
from recycle_plugin.core.coordinator.recovery_ways import say_impossible, say_replayed
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import Beside, LogsAt, Replay
from recycle_plugin.core.messages.from_workers import Accompanied, CaughtUp, Replaying, Unreplayable
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId

ITERATORS = (
    "its data comes from plain iterators, and no other worker knows yet which of their batches belong to the current "
    "step; engine.set_data_source() has no such limit"
)


def is_awaited(state: JobState, stage: int) -> bool:
    """Return whether all wait for a replay of the empty ``stage``."""
    return state.replay.waits_since is not None and stage in state.attendance.empty_stages()


def _after_loss(state: JobState) -> bool:
    """Wait for the empty stages if they can be replayed: True. Else report the reasons: False, and the job must end."""
    empty = state.attendance.empty_stages()
    why = why_not(state, empty)
    if why:
        say_impossible(state, empty, why)
        return False
    state.replay.begin(state.now)
    _say_replay(state, "")
    replay_deadlines.tell(state, empty)
    if not state.ending.finishing:  # past the last step nobody has to wait
        generations.go_on_without(state, f"stage {', '.join(map(str, empty))} is replayed")
        _accompany(state)
    return True


def go_on_without_stage(state: JobState) -> None:
    """Wait until the empty stages are replayed, or end the job if they can't be."""
    if not _after_loss(state):
        ends.give_up_going_on(state, ends.empty_stage(state), ends.crash(state))


def _say_replay(state: JobState, again: str) -> None:
    """Report which stages are replayed, and with which others. ``again``: why that has changed, or ""."""
    empty = state.attendance.empty_stages()
    say_replayed(state, empty, state.logs.along(state.committed, empty), again)


def _accompany(state: JobState) -> None:
    """Have a live worker of each stage to be replayed along do so; companions that do so already go on."""
    empty = state.attendance.empty_stages()
    for stage, why in state.logs.along(state.committed, empty).items():
        if state.replay.companion(stage) not in state.roster.workers:
            member = state.roster.first_of(stage)
            state.replay.accompanies(member)
            state.logs.begun_anew(member, why)
            _tell_replay(state, member)


def _tell_replay(state: JobState, member: Member, helpers: tuple[Member, ...] = ()) -> None:
    """Tell ``member`` to replay its stage, and record which stages it is told are replayed too."""
    checkpoint, empty = state.logs.checkpoint, state.attendance.empty_stages()
    stages = tuple(sorted({*empty, *state.logs.along(state.committed, empty)}))
    valid_from, passed = max(checkpoint.valid_from, state.steps.valid_from), tuple(state.logs.passed)
    logs, committed = _logs_for(state, member.seat.stage), state.committed
    state.replay.tell(member.worker, stages)
    replay = Replay(checkpoint.step, checkpoint.path, committed, stages, valid_from, passed, helpers, logs)
    state.tell(member.worker, replay)


def why_not(state: JobState, empty: tuple[int, ...]) -> str:
    """Return why the stages ``empty``, which are empty or about to be, can't be replayed, in words; "" if they can."""
    assert state.job is not None, "a lost worker has taken part in a job"
    if not state.logs.kept:
        return state.logs.why_not()
    if state.ending.finishing:
        for stage, why in sorted(state.logs.along(state.committed, empty).items()):
            return f"stage {stage} would have to be replayed too ({why}), and its script has ended"
    elif not set(state.roster.live_stages) - set(empty):
        back = [str(each.member) for each in state.joining]
        return "no worker is left" + f": {', '.join(back)} had come back, but did not take part yet" * bool(back)
    if state.ending.ended is not None:
        return "the job is about to end"
    if state.roster.shards > 1:
        return "its seats are held by several processes each, whose logs can't be replayed yet"
    if {0, state.job.stages - 1}.intersection(empty) and any(place.read for place in state.places.known().values()):
        return ITERATORS
    if state.job.rejoin == "never" and not state.vacancies.has_spares:
        return "recycle.rejoin is never, and no spare waits"
    for stage in empty:
        if _is_abandoned(state, stage):
            return f"too many processes in a row died before they had replayed stage {stage}"
    return state.logs.why_not()


def _is_abandoned(state: JobState, stage: int) -> bool:
    """Return whether nobody will come any more to replay ``stage``. Costs one look at each rank."""
    coming = any(each.stage == stage for each in state.joining)
    return not coming and all(map(state.vacancies.is_given_up, state.attendance.ranks_of_stage(stage)))


def catch_up(state: JobState, newcomer: NewcomerRecord) -> None:
    """Have a newcomer of an empty stage replay it, with the help of all members, which wait for that. Further newcomers
    of that stage wait, help too, and catch up later. Costs a message of the length of the roster.
    """
    _see_along(state)
    others = [each for each in state.joining if each.stage == newcomer.stage and each is not newcomer]
    if any(each.phase in (Phase.REPLAYING, Phase.REPLAYED) for each in others):
        newcomer.phase = Phase.WAITING
        _tell_beside(state, newcomer.stage)
        return
    newcomer.phase = Phase.REPLAYING
    helpers = tuple(each for each in state.roster if not state.ending.finishing)
    _tell_replay(state, newcomer.member, helpers)
    state.replay.waits_since = state.now
    replay_deadlines.tell(state, state.attendance.empty_stages())
    _tell_beside(state, newcomer.stage)


def _tell_beside(state: JobState, stage: int) -> None:
    """Tell the worker that replays ``stage`` which newcomers wait for it there. O(newcomers)."""
    here = [each for each in state.joining if each.stage == stage]
    waiting = tuple(each.member for each in here if each.phase is Phase.WAITING)
    for each in here:
        if each.phase is Phase.REPLAYING:
            state.tell(each.member.worker, Beside(waiting))


def _logs_for(state: JobState, stage: int) -> tuple[LogsAt, ...]:
    """Return where the logs are that a replay of ``stage`` reads: its own, its neighbours' and those of its tie."""
    assert state.job is not None, "a worker that replays has a job"
    stages = {stage - 1, stage, stage + 1, *state.job.shape.tie(stage)}
    return state.log_places.of([rank for each in stages for rank in state.attendance.ranks_of_stage(each)])


def see_gone(state: JobState) -> None:
    """Record logs gone with their hosts. A loss has all begin a checkpoint at once
    (core/worker/checkpoint_interval.py).
    """
    live = state.roster.ranks
    gone = state.log_places.gone(lambda rank: rank not in live and state.vacancies.is_host_gone(rank, state.now))
    for each in gone:
        state.logs.gone(each)
    if not gone or state.job is None:
        return
    stages = [stage for stage in range(state.job.stages) if state.logs.along(state.committed, (stage,))]
    ranks, hosts = sorted({each.member.rank for each in gone}), sorted({each.member.host for each in gone})
    if stages:
        state.say(
            "log_gone",
            f"the logs of ranks {', '.join(map(str, ranks))} are gone with host {', '.join(hosts)}: until the next "
            f"checkpoint is durable, which is begun at once, stages {', '.join(map(str, stages))} can only be "
            "replayed together with others",
            ranks=ranks,
            hosts=hosts,
            stages=stages,
            step=state.committed,
        )
    if state.replay.waits_since is not None:
        _see_along(state)


def _see_along(state: JobState) -> None:
    """Have stages replayed along that turn out to be needed during a replay; end the job if that can't be. A worker
    that replays already hears of them once it misses what they have sent.
    """
    empty = state.attendance.empty_stages()
    if state.logs.along(state.committed, empty).keys() <= state.replay.accompanied_stages:
        return
    if why_not(state, empty):
        go_on_without_stage(state)
    else:
        _say_replay(state, "the logs lack more than was known")
        _accompany(state)


def progress(state: JobState, message: Replaying) -> None:
    """Record that a worker has replayed a step, and tell those that wait: their deadline begins anew."""
    if _replays(state, message.worker):
        state.replay.waits_since = state.now
        state.tell(WORKERS, message)


def _replays(state: JobState, worker: WorkerId) -> bool:
    """Return whether ``worker`` is to replay its stage, and has not reported that it has."""
    newcomer = state.joining.get(worker)
    return state.replay.is_at_it(worker) or (newcomer is not None and newcomer.phase is Phase.REPLAYING)


def accompanied(state: JobState, message: Accompanied | CaughtUp) -> None:
    """Record that a companion is at its own state again. Once all are, and no stage is empty, all go on. A member that
    has just replayed its stage as a newcomer replays along as a newcomer does, so it may report CaughtUp.
    """
    member = state.roster.member(message.worker)
    if member is None or not _replays(state, message.worker):
        return
    state.replay.accompanied(message.worker)
    state.logs.replayed(member, state.committed)
    state.replay.waits_since = state.now
    state.say(
        "accompanied",
        f"{member} has replayed steps {state.logs.checkpoint.step + 1} to {message.step} of its stage too, and has "
        "its state from before the replay again",
        seat=str(member.seat),
        rank=member.rank,
        step=message.step,
    )
    _let_in(state)


def replayed(state: JobState, newcomer: NewcomerRecord, message: CaughtUp) -> None:
    """Record that a newcomer has its stage's state. Once no stage is empty, all go on."""
    newcomer.phase = Phase.REPLAYED
    state.logs.replayed(newcomer.member, state.committed)
    begun = state.logs.checkpoint.step
    state.say(
        "replayed",
        f"{newcomer.member} has replayed steps {begun + 1} to {message.step} of its stage"
        + f", with the help of {message.helpers} others" * bool(message.helpers),
        seat=str(newcomer.member.seat),
        rank=newcomer.member.rank,
        steps=message.step - begun,
        step=message.step,
        bytes=message.bytes,
        helpers=message.helpers,
    )
    state.replay.waits_since = state.now
    _let_in(state)


def _let_in(state: JobState) -> None:
    """Regroup with all that have replayed, if they fill all empty stages and all companions are done."""
    done = [each for each in state.joining if each.phase is Phase.REPLAYED]
    if not {each.stage for each in done} >= set(state.attendance.empty_stages()):
        return
    if any(_replays(state, worker) for worker in state.roster.workers):
        return
    news = [each.member for each in done if each.member.worker not in state.roster.workers]
    state.attendance.roster = Roster((*state.roster, *news))
    for member in news:
        state.steps.tell_again(member.worker, state.out)
    stages = sorted({each.stage for each in done})
    state.say(
        "stalled",
        f"all stages have workers again: stage {', '.join(map(str, stages))} had none for "
        f"{state.now - state.replay.lost_at:.2f} s",
        stages=stages,
        seconds=round(state.now - state.replay.lost_at, 4),
    )
    held_back, state.replay = state.replay.held_back, ReplayUnderWay()
    if held_back is not None:
        replayable.durable(state, held_back)
    if not state.ending.finishing:
        generations.go_on_without(state, f"stage {', '.join(map(str, stages))} was replayed")
    goodbyes.let_go(state)


def gone(state: JobState, newcomer: NewcomerRecord) -> None:
    """Handle the end of a newcomer that was to replay its stage, or had: another newcomer of the stage replays it."""
    if state.ending.failed:
        return
    if newcomer.phase is Phase.REPLAYED:
        state.attendance.roster = state.roster.without({newcomer.member.worker})
        go_on_without_stage(state)
    _tell_beside(state, newcomer.stage)
    for other in state.joining:
        if other.stage == newcomer.stage and other.phase is Phase.WAITING:
            catch_up(state, other)


def unreplayable(state: JobState, message: Unreplayable) -> None:
    """Replay the stage too that could make the missing data; end the job if there is none, or it does so already."""
    if not _replays(state, message.worker):
        return
    newcomer, member = state.joining.get(message.worker), state.roster.member(message.worker)
    replays = newcomer.member if newcomer is not None else member
    assert replays is not None, "a worker that replays is a newcomer or a member"
    stage = replays.seat.stage
    tried = state.replay.told(message.worker)
    if message.checkpoint:
        state.ending.unusable(message.checkpoint)
    if message.lacks is None or message.lacks in tried or state.ending.finishing:
        say_impossible(state, [stage], message.why, message.lacks)
        empty = ", ".join(map(str, state.attendance.empty_stages()))
        ends.end_without_stage(
            state,
            f"stage {empty} has no live worker left, and stage {stage} can't be replayed: {message.why}. "
            f"{state.ending.safe_point}",
        )
        return
    state.logs.unreadable(message.lacks, message.why)
    state.replay.waits_since = state.now
    _say_replay(state, message.why)
    _accompany(state)
    if newcomer is not None and newcomer.phase is Phase.REPLAYING:
        newcomer.phase = Phase.BEHIND
        catch_up(state, newcomer)
    else:
        _tell_replay(state, replays)


def call_off_late(state: JobState) -> None:
    """Give up silent replays that others can take over. End the job if that is not possible, or if nobody can come to
    replay.
    """
    since, job = state.replay.waits_since, state.job
    if since is None or job is None:
        return
    empty = state.attendance.empty_stages()
    at_work = {each.stage for each in state.joining if each.phase in (Phase.REPLAYING, Phase.REPLAYED)}
    if any(state.is_ending or _is_abandoned(state, stage) for stage in empty if stage not in at_work):
        go_on_without_stage(state)
        return
    if replay_deadlines.give_up_silent(state, empty, state.now - since):
        state.replay.waits_since = state.now
        replay_deadlines.tell(state, empty)
        return
    patience = replay_deadlines.patience(state, empty)
    if state.now - since <= patience.end_s:
        return
    ends.end_without_stage(
        state,
        f"stage {', '.join(map(str, empty))} has no live worker left, and nothing was heard for "
        f"{patience.end_s:.0f} s of the process that was to replay it: {patience}. {state.ending.safe_point}",
    )
