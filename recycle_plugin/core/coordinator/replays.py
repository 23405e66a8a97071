"""Stages that have lost their last worker, and are replayed from the logs of the others (SWIFT, PPoPP'23, section 5).

With a log (core/worker/step_log.py) such a loss does not end the job.  A generation without the stage is published, in
which everybody stops between two instructions and keeps what it has.  A newcomer of the stage takes its state from the
last durable checkpoint and replays what is committed since (core/worker/replay.py); then it is a member at once, and
what was begun and not committed is finished by lineage, as after any loss.

What a neighbour has sent to that stage may be in no log that can be read: its boundary is not logged, its disk was
full, a file is damaged.  Then a live worker of the neighbour, a *companion*, replays along (core/worker/companion.py);
and where what that one needs can't be read either, the next stage's does too, up to the whole pipeline.

Whether a stage can be replayed, and with whom, is known here; which way a loss goes is said in
core/coordinator/recovery_ways.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator import ends, replay_deadlines
from recycle_plugin.core.coordinator.joining import NewcomerRecord, Phase
from recycle_plugin.core.coordinator.output import WORKERS, CoordinatorOutput
from recycle_plugin.core.coordinator.recovery_ways import say_impossible, say_replayed
from recycle_plugin.core.messages.from_coordinator import Beside, LogsAt, Replay
from recycle_plugin.core.messages.from_workers import Accompanied, CaughtUp, Durable, Replaying, Unreplayable
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId

if TYPE_CHECKING:
    from recycle_plugin.core.coordinator.course import Course

ITERATORS = (
    "its data comes from plain iterators, and which of their batches belong to the step that is under way nobody else "
    "knows yet; engine.set_data_source() has no such limit"
)


def durable(course: Course, message: Durable, out: CoordinatorOutput) -> None:
    """Takes in that a checkpoint is durable, and tells all, who let go what led to it.

    While stages are replayed that waits: they all begin at one checkpoint, and need the logs from there on.  One of a
    step that is not committed, or no more since an earlier checkpoint was loaded, is none of this job's steps.
    """
    if not 0 <= message.step <= course.committed:
        return
    if course.logs.waits_since is not None:
        course.logs.held_back = message
        return
    before = course.logs.told
    if course.logs.durable(message):
        course.recovery_times.written(message.write_s)
        course.log_places.durable(message.step)
        out.tell(WORKERS, message)
        if course.logs.told != before:
            out.tell(WORKERS, course.logs.told)


def is_awaited(course: Course, stage: int) -> bool:
    """Whether all wait until ``stage``, in which nobody is at work, is replayed."""
    return course.logs.waits_since is not None and stage in course.attendance.empty_stages()


def after_loss(course: Course, now: float, out: CoordinatorOutput) -> bool:
    """Waits for the stages that have nobody, where they can be replayed: True.  False where the job has to end; then
    the reasons are said.
    """
    empty = course.attendance.empty_stages()
    why = why_not(course, empty)
    if why:
        say_impossible(course, empty, why, out)
        return False
    logs = course.logs
    if logs.waits_since is None:
        logs.lost_at = now
    logs.waits_since = now
    _say_replay(course, "", out)
    replay_deadlines.tell(course, empty, out)
    if not course.ending.finishing:  # else nobody has to wait
        course.go_on_without(f"stage {', '.join(map(str, empty))} is replayed", now, out)
        _accompany(course, out)
    return True


def _say_replay(course: Course, again: str, out: CoordinatorOutput) -> None:
    """Says what is replayed, and who replays along; ``again``: why that has changed, or empty."""
    empty = course.attendance.empty_stages()
    say_replayed(course, empty, out, course.logs.along(course.committed, empty), again)


def _accompany(course: Course, out: CoordinatorOutput) -> None:
    """Has a live worker of each stage that is to be replayed along do so; those that do so already go on."""
    empty = course.attendance.empty_stages()
    for stage, why in course.logs.along(course.committed, empty).items():
        if course.logs.companions.get(stage) not in course.roster.workers:
            member = course.roster.first_of(stage)
            course.logs.accompanies(member, why)
            _tell_replay(course, member, out)


def _tell_replay(course: Course, member: Member, out: CoordinatorOutput, helpers: tuple[Member, ...] = ()) -> None:
    """Tell ``member`` to replay its stage, and note which other stages it hears are made again meanwhile."""
    checkpoint, empty = course.logs.checkpoint, course.attendance.empty_stages()
    stages = tuple(sorted({*empty, *course.logs.along(course.committed, empty)}))
    valid_from, passed = max(checkpoint.valid_from, course.steps.valid_from), tuple(course.logs.passed)
    logs, committed = _logs_for(course, member.seat.stage), course.committed
    course.logs.told_of[member.worker] = stages
    replay = Replay(checkpoint.step, checkpoint.path, committed, stages, valid_from, passed, helpers, logs)
    out.tell(member.worker, replay)


def why_not(course: Course, empty: tuple[int, ...]) -> str:
    """Why ``empty``, stages that have nobody or are about to, can't be replayed, in words; empty where they can."""
    assert course.job is not None, "who is lost has taken part in a job"
    if not course.logs.kept:
        return course.logs.why_not()
    if course.ending.finishing:
        for stage, why in sorted(course.logs.along(course.committed, empty).items()):
            return f"stage {stage} would have to be replayed along ({why}), and its script is through"
    elif not set(course.roster.live_stages) - set(empty):
        back = [str(each.member) for each in course.joining]
        return "nobody is left" + f": {', '.join(back)} had come back, and not taken part yet" * bool(back)
    if course.ending.ended is not None:
        return "the job is about to end"
    if course.roster.shards > 1:
        return "its seats are held by several processes each, whose logs can't be replayed yet"
    if {0, course.job.stages - 1}.intersection(empty) and any(place.read for place in course.places.known().values()):
        return ITERATORS
    if course.job.rejoin == "never" and not course.vacancies.has_spares:
        return "recycle.rejoin is never, and no spare waits"
    for stage in empty:
        if _is_abandoned(course, stage):
            return f"of those that were to replay stage {stage}, too many in a row died before they had done so"
    return course.logs.why_not()


def _is_abandoned(course: Course, stage: int) -> bool:
    """Whether nobody will come any more to replay ``stage``.  Costs one look at each rank."""
    coming = any(each.stage == stage for each in course.joining)
    return not coming and all(map(course.vacancies.is_given_up, course.attendance.ranks_of_stage(stage)))


def catch_up(course: Course, newcomer: NewcomerRecord, now: float, out: CoordinatorOutput) -> None:
    """Has a newcomer of a stage that nobody holds replay it, with the help of all members, who wait for that; any other
    of that stage waits, helps too, and catches up later.  Costs a message as long as there are members.
    """
    _see_along(course, now, out)
    others = [each for each in course.joining if each.stage == newcomer.stage and each is not newcomer]
    if any(each.phase in (Phase.REPLAYING, Phase.REPLAYED) for each in others):
        newcomer.phase = Phase.WAITING
        _tell_beside(course, newcomer.stage, out)
        return
    newcomer.phase = Phase.REPLAYING
    helpers = tuple(each for each in course.roster if not course.ending.finishing)
    _tell_replay(course, newcomer.member, out, helpers)
    course.logs.waits_since = now
    replay_deadlines.tell(course, course.attendance.empty_stages(), out)
    _tell_beside(course, newcomer.stage, out)


def _tell_beside(course: Course, stage: int, out: CoordinatorOutput) -> None:
    """Tells the one that replays ``stage`` who waits for it there.  Costs one look at each newcomer."""
    here = [each for each in course.joining if each.stage == stage]
    waiting = tuple(each.member for each in here if each.phase is Phase.WAITING)
    for each in here:
        if each.phase is Phase.REPLAYING:
            out.tell(each.member.worker, Beside(waiting))


def _logs_for(course: Course, stage: int) -> tuple[LogsAt, ...]:
    """Where the logs are that a replay of ``stage`` reads: its own, its neighbours', and those of its tie."""
    assert course.job is not None, "who replays has a job"
    stages = {stage - 1, stage, stage + 1, *course.job.shape.tie(stage)}
    return course.log_places.of([rank for each in stages for rank in course.attendance.ranks_of_stage(each)])


def see_gone(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Takes in which logs are gone with their hosts; the loss of those who had written them has all begin a checkpoint
    at once, as every loss does (core/worker/checkpoint_interval.py).
    """
    live = course.roster.ranks
    gone = course.log_places.gone(lambda rank: rank not in live and course.vacancies.is_host_gone(rank, now))
    for each in gone:
        course.logs.gone(each)
    if not gone or course.job is None:
        return
    stages = [stage for stage in range(course.job.stages) if course.logs.along(course.committed, (stage,))]
    ranks, hosts = sorted({each.member.rank for each in gone}), sorted({each.member.host for each in gone})
    if stages:
        out.say(
            "log_gone",
            f"the logs of ranks {', '.join(map(str, ranks))} are gone with host {', '.join(hosts)}: until the next "
            f"checkpoint is durable, which is begun at once, stages {', '.join(map(str, stages))} are not replayed "
            "without others",
            ranks=ranks,
            hosts=hosts,
            stages=stages,
            step=course.committed,
        )
    if course.logs.waits_since is not None:
        _see_along(course, now, out)


def _see_along(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Have stages replayed along that turn out to be needed while others are replayed; end the job if that can't be.

    Whoever replays already and was not told of them hears of them once it misses what they have sent.
    """
    empty = course.attendance.empty_stages()
    if course.logs.along(course.committed, empty).keys() <= course.logs.companions.keys():
        return
    if why_not(course, empty):
        course.go_on_without_stage(now, out)
    else:
        _say_replay(course, "logs lack more than was known", out)
        _accompany(course, out)


def progress(course: Course, message: Replaying, now: float, out: CoordinatorOutput) -> None:
    """Takes in that a worker has replayed a step: who waits for that is told, and waits on."""
    if _replays(course, message.worker):
        course.logs.waits_since = now
        out.tell(WORKERS, message)


def _replays(course: Course, worker: WorkerId) -> bool:
    """Whether ``worker`` is to replay its stage, and has not said yet that it has."""
    newcomer, logs = course.joining.get(worker), course.logs
    along = worker in logs.companions.values() and worker not in logs.accompanied
    return along or (newcomer is not None and newcomer.phase is Phase.REPLAYING)


def accompanied(course: Course, message: Accompanied | CaughtUp, now: float, out: CoordinatorOutput) -> None:
    """Takes in that a companion has come to its own state again; once all have, and all stages have somebody, all go
    on.  One that has just replayed its stage as a newcomer does so as a newcomer once more.
    """
    member = course.roster.member(message.worker)
    if member is None or not _replays(course, message.worker):
        return
    course.logs.accompanied.add(message.worker)
    course.logs.replayed(member, course.committed)
    course.logs.waits_since = now
    out.say(
        "accompanied",
        f"{member} has replayed steps {course.logs.checkpoint.step + 1} to {message.step} of its stage along, and come "
        "to the state that it had",
        seat=str(member.seat),
        rank=member.rank,
        step=message.step,
    )
    _let_in(course, now, out)


def replayed(course: Course, newcomer: NewcomerRecord, message: CaughtUp, now: float, out: CoordinatorOutput) -> None:
    """Takes in that a newcomer has its stage's state; once all stages have somebody, all go on."""
    newcomer.phase = Phase.REPLAYED
    course.logs.replayed(newcomer.member, course.committed)
    begun = course.logs.checkpoint.step
    out.say(
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
    course.logs.waits_since = now
    _let_in(course, now, out)


def _let_in(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Goes on in a generation that has all who have replayed their stages, if they are enough for all stages."""
    done = [each for each in course.joining if each.phase is Phase.REPLAYED]
    if not {each.stage for each in done} >= set(course.attendance.empty_stages()):
        return
    if any(_replays(course, worker) for worker in course.roster.workers):
        return
    news = [each.member for each in done if each.member.worker not in course.roster.workers]
    course.attendance.roster = Roster((*course.roster, *news))
    for member in news:
        course.steps.tell_again(member.worker, out)
    stages = sorted({each.stage for each in done})
    out.say(
        "stalled",
        f"all stages have somebody again: stage {', '.join(map(str, stages))} was away for "
        f"{now - course.logs.lost_at:.2f} s",
        stages=stages,
        seconds=round(now - course.logs.lost_at, 4),
    )
    course.logs.waits_since, course.logs.given_up = None, 0
    course.logs.companions.clear()
    course.logs.accompanied.clear()
    course.logs.told_of.clear()
    if (message := course.logs.held_back) is not None:
        course.logs.held_back = None
        durable(course, message, out)
    if not course.ending.finishing:
        course.go_on_without(f"stage {', '.join(map(str, stages))} was replayed", now, out)
    course.let_go(out)


def gone(course: Course, newcomer: NewcomerRecord, now: float, out: CoordinatorOutput) -> None:
    """Takes in that a newcomer has gone which was to replay its stage, or had: another one of that stage does so."""
    if course.ending.failed:
        return
    if newcomer.phase is Phase.REPLAYED:
        course.attendance.roster = course.roster.without({newcomer.member.worker})
        course.go_on_without_stage(now, out)
    _tell_beside(course, newcomer.stage, out)
    for other in course.joining:
        if other.stage == newcomer.stage and other.phase is Phase.WAITING:
            catch_up(course, other, now, out)


def unreplayable(course: Course, message: Unreplayable, now: float, out: CoordinatorOutput) -> None:
    """Has the stage replayed along that could make once more what is missing; where there is none, or it has done so
    already, ends the job.
    """
    if not _replays(course, message.worker):
        return
    newcomer, member = course.joining.get(message.worker), course.roster.member(message.worker)
    replays = newcomer.member if newcomer is not None else member
    assert replays is not None, "who replays is a newcomer or a member"
    stage = replays.seat.stage
    tried = course.logs.told_of.get(message.worker, ())
    if message.checkpoint:
        course.ending.unusable(message.checkpoint)
    if message.lacks is None or message.lacks in tried or course.ending.finishing:
        say_impossible(course, [stage], message.why, out, message.lacks)
        empty = ", ".join(map(str, course.attendance.empty_stages()))
        ends.end_without_stage(
            course,
            f"stage {empty} has no live worker left, and stage {stage} can't be replayed: {message.why}. "
            f"{course.ending.safe_point}",
            out,
        )
        return
    course.logs.unreadable(message.lacks, message.why)
    course.logs.waits_since = now
    _say_replay(course, message.why, out)
    _accompany(course, out)
    if newcomer is not None and newcomer.phase is Phase.REPLAYING:
        newcomer.phase = Phase.BEHIND
        catch_up(course, newcomer, now, out)
    else:
        _tell_replay(course, replays, out)


def call_off_late(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Ends the job where nothing has been heard for too long of a stage that is to be replayed, or where nobody comes
    any more who could do so, since the job is about to end, or all who came have died.
    """
    since, job = course.logs.waits_since, course.job
    if since is None or job is None:
        return
    empty = course.attendance.empty_stages()
    at_work = {each.stage for each in course.joining if each.phase in (Phase.REPLAYING, Phase.REPLAYED)}
    if any(course.is_ending or _is_abandoned(course, stage) for stage in empty if stage not in at_work):
        course.go_on_without_stage(now, out)
        return
    if replay_deadlines.give_up_silent(course, empty, now - since, out):
        course.logs.waits_since = now
        replay_deadlines.tell(course, empty, out)
        return
    patience = replay_deadlines.patience(course, empty)
    if now - since <= patience.end_s:
        return
    ends.end_without_stage(
        course,
        f"stage {', '.join(map(str, empty))} has no live worker left, and nothing was heard for "
        f"{patience.end_s:.0f} s of who was to replay it: {patience}. {course.ending.safe_point}",
        out,
    )
