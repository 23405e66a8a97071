"""The coordinator's decisions: what each message to it leads to, as a state machine without clock, threads or sockets.

Messages go in, addressed messages and events come out; ``runtime.control.coordinator`` carries them.  Who takes part,
what is committed and how the job goes on is decided in core/coordinator/course.py.  Here, around that, is what workers
agree on before they start, and between them:

* A job starts when all ranks are there, and want the same (core/coordinator/enrolment.py).
* Barriers and complaints that belong to an older generation, or to one that has lost somebody, are dropped; what is
  said of a step is of that step, whoever is live, and the first complete word on it stays
  (core/messages/contributions.py).
* What can't be is said by nobody who goes on with the others (core/coordinator/words.py).
* What all have to hear of at one step, a rejection, a checkpoint or another batch size, is a generation that holds at
  once.

All that it knows is in its attributes, each thing in one place, and survives lab/simulator/state_dump.py.
"""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite

from recycle_plugin.core.coordinator import (
    contributing,
    departures,
    ends,
    goodbyes,
    operating,
    replays,
    resuming,
    returns,
    vanishing,
)
from recycle_plugin.core.coordinator.complaints import Complaints
from recycle_plugin.core.coordinator.course import Course
from recycle_plugin.core.coordinator.enrolment import Enrolment, weak_points
from recycle_plugin.core.coordinator.output import SUPERVISORS, WORKERS, CoordinatorOutput, Event, SupervisorOf, Whom
from recycle_plugin.core.coordinator.words import objection
from recycle_plugin.core.messages.from_coordinator import Answer, BarrierPassed, End, Lease, Pace
from recycle_plugin.core.messages.from_operators import Ask
from recycle_plugin.core.messages.from_workers import (
    Accompanied,
    BarrierReached,
    CatchUp,
    CaughtUp,
    CheckpointLoaded,
    ComputeTime,
    Contribution,
    Crashed,
    Durable,
    Exited,
    Fatal,
    Fingerprint,
    Heartbeat,
    HostGoes,
    Leaving,
    Left,
    LogBroken,
    Logged,
    LogsServed,
    Missing,
    Note,
    OutOfData,
    Post,
    ReadBoard,
    Ready,
    Replaying,
    Resized,
    Serving,
    StateHash,
    Stepped,
    StrangersAtLogs,
    SupervisorHeartbeat,
    SurvivorReport,
    Terminate,
    Through,
    Unguarded,
    Unreplayable,
    Vanishing,
    WantResult,
)
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.of_worker import OfWorker
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.deadlines import SUPERVISOR_BEAT_S, paced_s, shown
from recycle_plugin.core.vocabulary.describe import BROKEN
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId

OF_STEPS = (StateHash, Stepped, Contribution, ComputeTime, Fingerprint)
OF_BOARDS = (Post, ReadBoard, WantResult)


class Membership:
    """The state of a job: who takes part, which step is committed, and what everybody does next."""

    def __init__(self, ranks: int) -> None:
        self.course = Course()
        self._ranks, self._enrolment = ranks, Enrolment(ranks)
        self._complaints = Complaints()

    # --- what is known ---------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether all workers were there once."""
        return self.course.attendance.started

    @property
    def roster(self) -> Roster:
        return self.course.roster

    @property
    def lost(self) -> set[WorkerId]:
        return self.course.attendance.lost

    @property
    def unreachable(self) -> set[WorkerId]:
        """The lost workers of which nobody knows whether they are dead."""
        return self.course.attendance.unreachable

    @property
    def empty(self) -> frozenset[int]:
        """The ranks of vacant seats for which nobody has come yet."""
        return self.course.vacancies.empty

    @property
    def ended(self) -> End | None:
        """The way in which the job ends, once that is decided."""
        return self.course.ending.ended

    @property
    def committed(self) -> int:
        """The last step that stays."""
        return self.course.committed

    @property
    def generation(self) -> int:
        """The number of the newest generation; -1 before the start."""
        return self.course.regrouping.generation

    @property
    def regrouping(self) -> int | None:
        """The generation that members are reporting for at once, if any."""
        return self.course.regrouping.at_once

    # --- messages in -----------------------------------------------------------------------------

    def receive(self, message: object, now: float) -> CoordinatorOutput:
        """Handles one message that arrived at ``now`` (seconds); returns what it leads to."""
        out = CoordinatorOutput()
        if isinstance(message, OfWorker) and self._is_dealt_with(message, now, out):
            return out
        match message:  # what comes all the time first, since classes are tried one by one
            case Heartbeat():
                self.course.heartbeat(message, out)
            case SupervisorHeartbeat():
                self.course.attendance.failure_detector.supervisor_heartbeat(message)
            case ComputeTime():
                self.course.steps.add_compute_time(message)
            case Stepped():
                self.course.step(message, now, out)
            case Contribution():
                self._contribute(message, now, out)
            case Ready():
                self._enrol(message, now, out)
            case Serving():
                returns.serving(self.course, message, out)
            case StateHash():
                returns.state_hash(self.course, message, now, out)
            case SurvivorReport():
                resuming.report(self.course, message, now, out)
            case OutOfData():
                contributing.out_of_data(self.course, message, now, out)
            case BarrierReached():
                self._arrive(message, out)
            case CheckpointLoaded():
                self._load(message, now, out)
            case Resized():
                self._resize(message, now, out)
            case Fingerprint():
                self.course.steps.add_fingerprint(message)
            case Leaving(all=True):
                self._end_planned(f"{self.course.attendance.named(message.rank)}: {message.reason}", out)
            case Leaving():
                departures.leave(self.course, [message], now, out)
            case Through():
                goodbyes.through(self.course, message, out)
            case Left():
                departures.goodbye(self.course, message, now, out)
            case Vanishing():
                vanishing.vanish(self.course, message)
            case Exited():
                self.course.died(message, now, out)
            case Unguarded():
                self.course.unguarded(message, out)
            case Missing():
                self._send_again(message, now, out)
            case Terminate():
                self._terminate(message, out)
            case Fatal():
                ends.end(self.course, message.text, out)
            case Crashed():
                self.course.attendance.crashed(message, out)
            case Note():
                self._note(message, out)
            case _:
                self._hear_of_logs(message, now, out)
        vanishing.resolve(self.course, now, out)
        return out

    def _is_dealt_with(self, message: OfWorker, now: float, out: CoordinatorOutput) -> bool:
        """Handles what is not to be said, what is of boards, and what a newcomer says; returns whether it was that."""
        if (why := objection(message, self.course)) is not None:
            if why:
                self._give_up_confused(message.worker, why, now, out)
        elif isinstance(message, OF_BOARDS):
            self._board(message, out)
        elif isinstance(message, HostGoes):  # whoever is there, a newcomer too
            operating.host_goes(self.course, message, now, out)
        elif self.is_outside(message.worker) and not self._is_entering(message):
            self._hear_newcomer(message, now, out)
        else:
            return False
        return True

    def _hear_of_logs(self, message: object, now: float, out: CoordinatorOutput) -> None:
        """Handles what is said of logs, and of stages that are replayed from them."""
        match message:
            case Durable():
                replays.durable(self.course, message, out)
            case Logged() if message.step < unstarted(self.committed):
                self.course.logs.heard(message)
            case LogBroken():
                self._log_broken(message, out)
            case Replaying():
                replays.progress(self.course, message, now, out)
            case Accompanied() | CaughtUp():
                replays.accompanied(self.course, message, now, out)
            case Unreplayable():
                replays.unreplayable(self.course, message, now, out)
            case LogsServed():
                self.course.log_places.served(message)
            case StrangersAtLogs():
                out.say("stranger", message.text, address=message.address)

    def greet(self, worker: WorkerId, host: str) -> CoordinatorOutput:
        """Handles that a process on ``host`` has connected as ``worker``; if it can't take part, it hears so before it
        does anything.
        """
        out = CoordinatorOutput()
        known = self.course.vacancies.come(worker) or not (self.started or worker.incarnation)
        if self.ended is None and not known:
            self._turn_away(worker, host, out)
        return out

    def identify(self, claimed: WorkerId) -> WorkerId:
        """The identity of a process that connects as ``claimed``, which another one may be already."""
        return self.course.vacancies.identify(claimed)

    def is_outside(self, worker: WorkerId) -> bool:
        """Whether the job has started, and goes on without ``worker``, which is no member yet."""
        return self.course.vacancies.is_outside(worker)

    def is_apart(self, worker: WorkerId) -> bool:
        """Whether ``worker`` does not hear what is said to all: it is lost, or a newcomer that has not asked yet to
        take part.
        """
        return worker in self.lost or (self.is_outside(worker) and self.course.joining.get(worker) is None)

    def supervisor(self, rank: int, there: bool, now: float) -> CoordinatorOutput:
        """Handles that the supervisor of ``rank`` has come, or has gone where it is not ``there``."""
        out = CoordinatorOutput()
        if there:
            self._pace(SupervisorOf(rank), out)
            self.course.vacancies.supervised(rank, now, out)
            self.course.recovery_times.supervised(rank, now)
            self.course.log_places.supervised(rank, out)
        else:
            self.course.vacancies.unsupervised(rank, now)
        return out

    def _pace(self, whom: Whom, out: CoordinatorOutput) -> None:
        """Has supervisors speak less often in a large job."""
        if (job := self.course.job) is not None:
            every_s = paced_s(SUPERVISOR_BEAT_S, self._ranks, job.deadlines)
            if every_s > SUPERVISOR_BEAT_S:
                out.tell(whom, Pace(every_s))

    def join(self, number: int, host: str, waits: bool, now: float) -> CoordinatorOutput:
        """Handles that a supervisor on ``host``, the ``number``-th that does, asks for the seat of a lost worker; if it
        ``waits``, it takes the next one that is lost.
        """
        out = CoordinatorOutput()
        course = self.course
        course.vacancies.join(number, host, waits, self.unreachable, course.is_ending, now, out)
        return out

    def joiner_gone(self, number: int) -> None:
        """Handles that a supervisor is gone which has asked for a seat, and has none."""
        self.course.vacancies.joiner_gone(number)

    def asked(self, request: Ask, now: float) -> tuple[Answer, CoordinatorOutput]:
        """Handles an operator's request."""
        out = CoordinatorOutput()
        return operating.answer(request, self.course, now, out), out

    def fail(self, text: str) -> CoordinatorOutput:
        """Ends the job, since nobody can go on, for a reason that is no worker's."""
        out = CoordinatorOutput()
        ends.end(self.course, text, out)
        return out

    def connection_lost(self, worker: WorkerId, now: float) -> CoordinatorOutput:
        """Handles that a worker's connection broke without a goodbye: it is gone, or cut off, which is the same to its
        peers.
        """
        out = CoordinatorOutput()
        if not (self.is_outside(worker) or worker in self.course.vanished):  # of those the supervisor says how they end
            self.course.lose(worker, Cause.DIED, BROKEN, now, now, out)
        return out

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The paths of the checkpoints that may be named as safe, and that stages are replayed from."""
        return tuple(self.course.ending.checkpoints)

    def removed(self, path: str) -> CoordinatorOutput:
        """Handles that the checkpoint at ``path`` is there no more."""
        out, ending = CoordinatorOutput(), self.course.ending
        last = path == ending.checkpoint
        ending.unusable(path)
        self.course.logs.removed(path)
        if last:
            more = "; no stage can be replayed before the next one" * self.course.logs.kept
            out.say("warning", f"the checkpoint {path} was removed{more}. {ending.safe_point}")
        return out

    def tick(self, now: float) -> CoordinatorOutput:
        """Handles that time has passed: it is ``now`` (seconds).  To be told every
        ``core.vocabulary.deadlines.TICK_S``.
        """
        out = CoordinatorOutput()
        self.course.tick(now, out)
        vanishing.resolve(self.course, now, out)
        return out

    def regroup_overdue(self, seconds: float) -> CoordinatorOutput:
        """Handles that the deadline of a regrouping, ``seconds``, has passed."""
        out = CoordinatorOutput()
        resuming.overdue(self.course, seconds, out)
        return out

    def _give_up_confused(self, worker: WorkerId, why: str, now: float, out: CoordinatorOutput) -> None:
        """Sees to it that nobody goes on with a worker that says what can't be."""
        if self.is_outside(worker):
            self.course.attendance.confused.add(worker)
            out.fence(worker, why)  # its supervisor says when it is dead
        elif self.ended is None or not self.ended.failed:
            self.course.give_up(worker, Cause.CONFUSED, why, now, out)

    # --- joining ---------------------------------------------------------------------------------

    def _is_entering(self, message: OfWorker) -> bool:
        """Whether a newcomer says something of a step in the generation that it has reported for, while others that
        come as one with it have not: that counts as any member's.
        """
        newcomer = self.course.joining.get(message.worker)
        return newcomer is not None and newcomer.reported and isinstance(message, OF_STEPS)

    def _hear_newcomer(self, message: OfWorker, now: float, out: CoordinatorOutput) -> None:
        """Handles what is said of a process that is no member yet, and can end nobody's training but its own."""
        who = self.course.attendance.named(message.rank)
        match message:
            case Exited():
                returns.died(self.course, message, now, out)
            case CatchUp():
                returns.catch_up(self.course, message, now, out)
            case CaughtUp():
                returns.caught_up(self.course, message, now, out)
            case StateHash():
                returns.state_hash(self.course, message, now, out)
            case Replaying():
                replays.progress(self.course, message, now, out)
            case Unreplayable():
                replays.unreplayable(self.course, message, now, out)
            case LogBroken():
                self._log_broken(message, out)
            case Through():
                goodbyes.through(self.course, message, out)
            case SurvivorReport():
                resuming.report(self.course, message, now, out)
            case Unguarded():
                self.course.unguarded(message, out)
            case Heartbeat():
                returns.watch(self.course, message)
                out.tell(message.worker, Lease(message.number, 0.0))
            case SupervisorHeartbeat():
                returns.watch(self.course, message)
                self.course.vacancies.heard(message.worker, now)
            case Fatal():
                out.say("warning", f"{who} can't come back: {message.text}", rank=message.rank)
            case Crashed():
                out.say(
                    "error",
                    f"the script of {who}, which was to come back, ended with {message.error}",
                    rank=message.rank,
                    traceback=message.trace,
                )
            case Note():
                if message.kind == "restored" and isinstance(seconds := message.details.get("seconds"), float | int):
                    self.course.recovery_times.loaded(seconds)
                self._note(message, out)

    def _enrol(self, ready: Ready, now: float, out: CoordinatorOutput) -> None:
        course, worker = self.course, ready.worker
        if course.speaker(worker) is not None:
            return  # it is there already
        if course.vacancies.is_newcomer(worker):
            course.recovery_times.ready(worker.rank, now, course.vacancies.due(worker), again=True)
            returns.begin(course, ready, out)
            course.log_places.ready(ready, out)
            return
        if (self.started and self.is_outside(worker)) or self._enrolment.is_stranger(worker):
            self._turn_away(worker, ready.member.host, out)
            return
        if self.started:
            return  # it was there
        course.recovery_times.ready(worker.rank, now)
        course.log_places.ready(ready, out)
        if not self._enrolment.add(ready) or self.ended is not None:
            return
        contradiction = self._enrolment.contradiction()
        if contradiction is not None:
            ends.end(self.course, contradiction, out)
            return
        self._begin(ready.job, ready.stepped, now, out)

    def _turn_away(self, worker: WorkerId, host: str, out: CoordinatorOutput) -> None:
        self.course.attendance.turn_away(worker, host, self.committed + 1, out)

    def _begin(self, job: JobSpec, stepped: int, now: float, out: CoordinatorOutput) -> None:
        shape, roster = job.shape, self._enrolment.roster
        self.course.begin(roster, job, stepped)
        seats = {str(seat): roster.holding(seat).rank for seat in roster.seats}
        others = {str(seat): [other.rank for other in roster.group(seat)[1:]] for seat in roster.seats}
        out.say(
            "start",
            f"{shape.replicas} replicas of {shape.stages} stages, {shape.micro_batches} micro-batches each; run folder "
            f"{job.run_dir}",
            job=asdict(job),
            seats=seats,
            **({"others": others} if roster.shards > 1 else {}),
            hosts=sorted({member.host for member in roster}),
            seat_hosts={str(seat): roster.holding(seat).host for seat in roster.seats},
        )
        out.say(
            "deadlines",
            f"who waits how long for what, in the order in which it fires:\n{shown(job.deadlines.table)}",
            table=[row._asdict() for row in job.deadlines.table],
        )
        for kind, text, details, refused in weak_points(job, roster, shape):
            ends.end(self.course, text, out) if refused else out.say(kind, text, **details)
        self._pace(SUPERVISORS, out)
        if self.ended is None:
            if self.course.logs.some:
                out.tell(WORKERS, self.course.logs.told)
            self.course.regroup("start", now, out)

    def _board(self, message: Post | ReadBoard | WantResult, out: CoordinatorOutput) -> None:
        match message:
            case Post():
                self.course.boards.post(message, self.lost, out)
            case ReadBoard():
                self.course.boards.read(message, out)
            case WantResult():
                for holder in self.roster.of_ranks([message.holder]):
                    out.tell(holder.worker, message)

    # --- in a step -------------------------------------------------------------------------------

    def _contribute(self, message: Contribution, now: float, out: CoordinatorOutput) -> None:
        norm = self.course.steps.contribute(message, out)
        if norm is not None:
            self._reject(message.step, norm, now, out)

    def _reject(self, step: int, norm: float, now: float, out: CoordinatorOutput) -> None:
        """Sees to it that everybody hears that ``step`` can't stay as it was applied, and takes it back; some gradients
        leave nothing to go on with, and the job ends.
        """
        validation, safe_point = self.course.steps.validation, self.course.ending.safe_point
        if validation.hopeless(norm):
            ends.end(
                self.course,
                f"the gradient norm of step {step} is {norm}. {safe_point}; to skip such steps set recycle.nonfinite "
                'to "skip"',
                out,
            )
            return
        out.say(
            "rejected",
            f"step {step} is taken back and {'clipped' if isfinite(norm) else 'skipped'}: its gradient norm is "
            f"{norm:.4g} "
            f"({validation.rejected} of {validation.judged} steps so far)",
            step=step,
            norm=norm,
            rejected=validation.rejected,
            judged=validation.judged,
        )
        if not self.course.halted:
            self.course.regroup(f"rejection of step {step}", now, out, keeps_plan=True)

    def _send_again(self, missing: Missing, now: float, out: CoordinatorOutput) -> None:
        """Handles a complaint: a connection between two live workers has lost something.  All regroup, over new
        connections, and it is sent once more.

        Where that does not help, the one goes that is to be doubted (core/coordinator/complaints.py); the job ends
        where nobody knows which.
        """
        complaint = self._complaints.add(missing, self.roster, self.committed, self.course.holds(missing.generation))
        if complaint is None:
            return
        why, tries, doubted = complaint
        if complaint.again:
            out.say("warning", f"{why}: all meet again, over new connections")
            self.course.regroup(why, now, out)
        elif doubted is not None:
            self.course.give_up(doubted, Cause.LINK, f"{why}, for the {tries}th time", now, out)
        else:
            ends.end(
                self.course,
                f"{why}, {tries} times, and nobody in it is lost: see to the network between their hosts, "
                f"or let GLOO_SOCKET_IFNAME name the interface that connects them. {self.course.ending.safe_point}",
                out,
            )

    # --- logs ------------------------------------------------------------------------------------

    def _log_broken(self, message: LogBroken, out: CoordinatorOutput) -> None:
        newcomer = self.course.joining.get(message.worker)
        member = self.roster.member(message.worker) if newcomer is None else newcomer.member
        if not 0 < message.step < unstarted(self.committed):
            return  # there is nothing of that
        if member is not None:
            self.course.logs.broken(message, member.seat.stage)
        out.say(
            "log_broken",
            f"{self.course.attendance.named(message.rank)} logs nothing from step {message.step} on: {message.why}; "
            "until the next checkpoint is durable no stage can be replayed over that step",
            rank=message.rank,
            step=message.step,
            why=message.why,
        )

    # --- between steps ---------------------------------------------------------------------------

    def _arrive(self, message: BarrierReached, out: CoordinatorOutput) -> None:
        values = self.course.barrier(message, message.place, message.values, out)
        if values is not None:
            self.course.passed(message.place, values, out)
            out.tell(WORKERS, BarrierPassed(message.place, values, unstarted(self.committed)))

    def _load(self, message: CheckpointLoaded, now: float, out: CoordinatorOutput) -> None:
        if self.course.barrier(message, "the state of a checkpoint", {}, out) is not None:
            self.course.regroup("a checkpoint was loaded", now, out)

    def _resize(self, message: Resized, now: float, out: CoordinatorOutput) -> None:
        """Takes another batch size.  It counts from the first who says it, since all have passed a barrier before: also
        where one of them dies now.
        """
        self.course.resize(message, out)
        if self.course.barrier(message, "another batch size", {}, out) is not None:
            self.course.regroup("another batch size", now, out)

    def _terminate(self, message: Terminate, out: CoordinatorOutput) -> None:
        who = (
            f"the supervisor of {self.course.attendance.named(message.rank)} on host {message.host} got "
            if message.host
            else ""
        )
        self._end_planned(f"{who}{message.reason}", out)

    def _end_planned(self, why: str, out: CoordinatorOutput) -> None:
        out.say("terminate", f"{why}: the job ends at the next commit")
        ends.end_planned(self.course, why, out)

    def _note(self, note: Note, out: CoordinatorOutput) -> None:
        if note.kind == "checkpoint" and isinstance(path := note.details.get("path"), str):
            self.course.ending.saved(path)
        if note.is_known:
            out.events.append(Event(note.kind, note.text, {**note.details, "rank": note.rank}))
