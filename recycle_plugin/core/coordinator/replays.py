"""Stages that have lost their last worker, and are replayed from the logs of the others (SWIFT, PPoPP'23, section 5).

With a log (core/worker/step_log.py) such a loss does not end the job.  A generation without the stage is published, in
which everybody stops between two instructions and keeps what it has.  A newcomer of the stage takes its state from the
last durable checkpoint and replays what is committed since (core/worker/replay.py); then it is a member at once, and
what was begun and not committed is finished by lineage, as after any loss.

Which way a loss goes is decided here, once, and said with its reasons: peers of the stage take its work; or it is
replayed; or the job ends, and names the checkpoint to go on from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator.joining import Newcomer, Phase
from recycle_plugin.core.coordinator.output import WORKERS, CoordinatorOutput
from recycle_plugin.core.messages.protocol import (
    CaughtUp,
    Durable,
    LogBroken,
    Logged,
    LogOnly,
    Replay,
    Replaying,
    Unreplayable,
)
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId

if TYPE_CHECKING:
    from recycle_plugin.core.coordinator.course import Course

ITERATORS = (
    "its data comes from plain iterators, and which of their batches belong to the step that is under way nobody else "
    "knows yet; engine.set_data_source() has no such limit"
)
UNCOMPARED = "its stage's last worker was lost before their states were compared"


class Logs:
    """What is known of the logs of a job of ``stages`` stages, where any are ``kept``.  ``waits_since``: since when, in
    seconds, nothing has been heard of the stages that are to be replayed; None where there are none.

    ``boundaries``: those of which the logs have all that has crossed since the checkpoint that stages are replayed
    from.  What the workers log is that at least, at any moment: one that goes from what they are told goes here first,
    and one that comes counts from the next checkpoint on, before which all have been told.
    """

    def __init__(self, kept: bool = False, stages: int = 1, boundaries: Collection[int] | None = None) -> None:
        self.kept, self._stages = kept, stages
        self.boundaries = self._told = frozenset(range(stages - 1) if boundaries is None else boundaries)
        self._durable: Durable | None = None
        self._broken: dict[WorkerId, tuple[LogBroken, int]] = {}  # with the worker's stage
        self._written: dict[WorkerId, int] = {}  # the last step that is on a worker's disk, as far as it has said
        self.waits_since: float | None = None
        self.passed: list[str] = []  # the barriers since the last commit
        self.lost_at = 0.0  # when the first of them lost its last worker, in seconds

    @property
    def checkpoint(self) -> Durable:
        """The checkpoint from which stages are replayed; AssertionError where there is none."""
        assert self._durable is not None, "no checkpoint is durable yet"
        return self._durable

    @property
    def some(self) -> bool:
        """Whether the workers are to log some boundaries only; as long as nobody says so, they log all."""
        return self.kept and len(self._told) < self._stages - 1

    @property
    def told(self) -> LogOnly:
        """What the workers are told to log."""
        return LogOnly(tuple(sorted(self._told)))

    def durable(self, message: Durable) -> bool:
        """Takes in that a checkpoint is durable; returns whether it is later than the last one."""
        if not self.kept or (self._durable is not None and message.step <= self._durable.step):
            return False
        told = self._told if message.boundaries is None else frozenset(message.boundaries)
        self.boundaries, self._told = self._told & told, told
        self._durable = message
        self._broken = {worker: each for worker, each in self._broken.items() if each[0].step > message.step}
        return True

    def broken(self, message: LogBroken, stage: int) -> None:
        """Takes in that the log of a worker of ``stage`` lacks something."""
        if message.worker not in self._broken or message.step < self._broken[message.worker][0].step:
            self._broken[message.worker] = message, stage

    def heard(self, message: Logged) -> None:
        """Takes in how much of a worker's log is on its disk."""
        self._written[message.worker] = message.step

    def lost(self, member: Member) -> None:
        """Takes in that a worker is lost, and with it what it had not on its disk yet."""
        worker, written = member.worker, self._written.pop(member.worker, None)
        if self.kept and written is not None:
            written = max(written, self._durable.step) if self._durable is not None else written
            why = "it was lost, and only what was before that was surely on its disk"
            self.broken(LogBroken(worker.rank, written + 1, why, incarnation=worker.incarnation), member.seat.stage)

    def replayed(self, by: Member, committed: int) -> None:
        """Takes in that the stage of ``by`` was replayed up to step ``committed``: all that it had sent is logged anew,
        but what ``by`` says that it could not.
        """
        stage = by.seat.stage
        self._broken = {
            worker: (replace(each, step=max(each.step, committed + 1)), its)
            if its == stage and worker != by.worker
            else (each, its)
            for worker, (each, its) in self._broken.items()
        }

    def resume(self, committed: int, held: Mapping[str, Mapping[str, str]], workers: Collection[WorkerId]) -> None:
        """Takes in that ``workers`` go on behind ``committed`` with what they have ``held``.  What is missing of later
        steps is made again, and logged by who does so, unless somebody of the stage has its sum already.

        Who is new among them has nothing to log of earlier steps, or has said so.
        """
        self._written = dict.fromkeys(workers, committed) | self._written

        def made_again(each: LogBroken, stage: int) -> bool:
            sums = {f"reduced {stage}@{step}" for step in range(each.step, committed + 3)}
            return each.step > committed and not any(sums & have.keys() for have in held.values())

        lost = {worker for worker, each in self._broken.items() if made_again(*each) and worker not in self._written}
        self._broken = {worker: each for worker, each in self._broken.items() if worker not in lost}

    def rewind(self) -> None:
        """Takes in that all have loaded another state, to which no log leads."""
        self._durable = None
        self._broken.clear()

    def why_not(self, committed: int, stages: Collection[int]) -> str:
        """Why ``stages`` can't be replayed up to ``committed``, in words; empty where they can.  What they have sent to
        each other is made again.
        """
        if not self.kept:
            return "nothing is logged (recycle.log)"
        if self._durable is None:
            return "no checkpoint that a stage could be replayed from is durable yet"
        beside = (each for each in range(self._stages - 1) if (each in stages) != (each + 1 in stages))
        if (boundary := next((each for each in beside if each not in self.boundaries), None)) is not None:
            return f"boundary {boundary}|{boundary + 1} is not logged"
        for worker, (each, stage) in sorted(self._broken.items()):
            if each.step <= committed and stage not in stages and {stage - 1, stage + 1}.intersection(stages):
                return f"the log of rank {worker.rank} lacks something of step {each.step}: {each.why}"
        return ""


def is_awaited(course: Course, stage: int) -> bool:
    """Whether all wait until ``stage``, in which nobody is at work, is replayed."""
    return course.logs.waits_since is not None and stage in course.attendance.view(course.roster).empty_stages()


def after_loss(course: Course, now: float, out: CoordinatorOutput) -> bool:
    """Waits for the stages that have nobody, where they can be replayed: True.  False where the job has to end; then
    the reasons are said.
    """
    empty = course.attendance.view(course.roster).empty_stages()
    why = why_not(course, empty)
    stages = ", ".join(map(str, empty))
    if why:
        if course.logs.kept:
            out.say("recovery", f"stage {stages} can't be replayed: {why}", way="end", stages=list(empty), why=why)
        return False
    for member in [each for stage in empty for each in course.roster.joining(stage)]:
        course.give_up(member.worker, Cause.TOGETHER, UNCOMPARED, now, out)  # and comes here again
        return True
    logs = course.logs
    if logs.waits_since is None:
        logs.lost_at = now
    logs.waits_since = now
    steps = course.committed - logs.checkpoint.step
    out.say(
        "recovery",
        f"stage {stages} has nobody left: it is replayed from the logs, {steps} step{'s' * (steps != 1)} behind the "
        f"checkpoint of step {logs.checkpoint.step}, and the others wait with all they have",
        way="replay",
        stages=list(empty),
        steps=steps,
        checkpoint=logs.checkpoint.step,
    )
    course.go_on_without(f"stage {stages} is replayed", now, out)
    return True


def why_not(course: Course, empty: tuple[int, ...]) -> str:
    """Why ``empty``, stages that have nobody or are about to, can't be replayed, in words; empty where they can."""
    assert course.job is not None, "who is lost has taken part in a job"
    if not set(course.roster.live_stages) - set(empty):
        return "nobody is left"
    if course.is_ending:
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
    return course.logs.why_not(course.committed, empty)


def _is_abandoned(course: Course, stage: int) -> bool:
    """Whether nobody will come any more to replay ``stage``.  Costs one look at each rank."""
    coming = any(each.stage == stage for each in course.joining)
    return not coming and all(map(course.vacancies.is_given_up, course.attendance.ranks_of_stage(stage)))


def catch_up(course: Course, newcomer: Newcomer, out: CoordinatorOutput) -> None:
    """Has a newcomer of a stage that nobody holds replay it, with the help of all members, who wait for that; any other
    of that stage waits, and catches up later.  Costs a message as long as there are members.
    """
    others = [each for each in course.joining if each.stage == newcomer.stage and each is not newcomer]
    if any(each.phase in (Phase.REPLAYING, Phase.REPLAYED) for each in others):
        newcomer.phase = Phase.WAITING
        return
    newcomer.phase = Phase.REPLAYING
    checkpoint = course.logs.checkpoint
    stages = course.attendance.view(course.roster).empty_stages()
    valid_from, passed = max(checkpoint.valid_from, course.steps.valid_from), tuple(course.logs.passed)
    helpers = tuple(member for member in course.roster if not member.joining)
    out.tell(
        newcomer.member.worker,
        Replay(checkpoint.step, checkpoint.path, course.committed, stages, valid_from, passed, helpers),
    )


def progress(course: Course, message: Replaying, now: float, out: CoordinatorOutput) -> None:
    """Takes in that a newcomer has replayed a step: who waits for its stage is told, and waits on."""
    newcomer = course.joining.get(message.worker)
    if newcomer is not None and newcomer.phase is Phase.REPLAYING:
        course.logs.waits_since = now
        out.tell(WORKERS, message)


def replayed(course: Course, newcomer: Newcomer, message: CaughtUp, now: float, out: CoordinatorOutput) -> None:
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
    if {each.stage for each in done} < set(course.attendance.view(course.roster).empty_stages()):
        return
    news = [replace(each.member, joining=False) for each in done if each.member.worker not in course.roster.workers]
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
    course.logs.waits_since = None
    course.go_on_without(f"stage {', '.join(map(str, stages))} was replayed", now, out)


def gone(course: Course, newcomer: Newcomer, now: float, out: CoordinatorOutput) -> None:
    """Takes in that a newcomer has gone which was to replay its stage, or had: another one of that stage does so."""
    if course.ending.failed:
        return
    if newcomer.phase is Phase.REPLAYED:
        course.attendance.roster = course.roster.without({newcomer.member.worker})
        course.go_on_without_stage(now, out)
    for other in course.joining:
        if other.stage == newcomer.stage and other.phase is Phase.WAITING:
            catch_up(course, other, out)


def unreplayable(course: Course, message: Unreplayable, out: CoordinatorOutput) -> None:
    """Ends the job, since a stage can't be replayed and nobody has it."""
    newcomer = course.joining.get(message.worker)
    if newcomer is not None and newcomer.phase is Phase.REPLAYING:
        text = f"stage {newcomer.stage} can't be replayed: {message.why}"
        out.say("recovery", text, way="end", stages=[newcomer.stage], why=message.why)
        course.end(f"stage {newcomer.stage} has no live worker left, and {text}. {course.ending.safe_point}", out)


def call_off_late(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Ends the job where nothing has been heard for too long of a stage that is to be replayed, or where nobody comes
    any more who could do so, since the job is about to end, or all who came have died.
    """
    since, job = course.logs.waits_since, course.job
    if since is None or job is None:
        return
    empty = course.attendance.view(course.roster).empty_stages()
    at_work = {each.stage for each in course.joining if each.phase in (Phase.REPLAYING, Phase.REPLAYED)}
    if any(course.is_ending or _is_abandoned(course, stage) for stage in empty if stage not in at_work):
        course.go_on_without_stage(now, out)
        return
    if now - since <= job.deadlines.wait_timeout_s:
        return
    course.end(
        f"stage {', '.join(map(str, empty))} has no live worker left, and nothing was heard for "
        f"{job.deadlines.wait_timeout_s:.0f} s of who was to replay it. {course.ending.safe_point}",
        out,
    )
