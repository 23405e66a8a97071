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

All that it knows is in its attributes, each thing in one place, and survives core/coordinator/state_dump.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from math import isfinite
from typing import Any

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
        if (handle := OF_MEMBERS.get(type(message))) is not None:
            handle(self, message, now, out)
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
        if (handle := OF_NEWCOMERS.get(type(message))) is not None:
            handle(self, message, now, out)

    def _heartbeat_of_newcomer(self, message: Heartbeat, now: float, out: CoordinatorOutput) -> None:
        returns.watch(self.course, message)
        out.tell(message.worker, Lease(message.number, 0.0))

    def _supervisor_heartbeat_of_newcomer(
        self, message: SupervisorHeartbeat, now: float, out: CoordinatorOutput
    ) -> None:
        returns.watch(self.course, message)
        self.course.vacancies.heard(message.worker, now)

    def _error_of_newcomer(self, message: Fatal | Crashed, now: float, out: CoordinatorOutput) -> None:
        who = self.course.attendance.named(message.rank)
        if isinstance(message, Fatal):
            out.say("warning", f"{who} can't come back: {message.text}", rank=message.rank)
        else:
            out.say(
                "error",
                f"the script of {who}, which was to come back, ended with {message.error}",
                rank=message.rank,
                traceback=message.trace,
            )

    def _note_of_newcomer(self, message: Note, now: float, out: CoordinatorOutput) -> None:
        if message.kind == "restored" and isinstance(seconds := message.details.get("seconds"), float | int):
            self.course.recovery_times.loaded(seconds)
        self._note(message, now, out)

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

    def _logged(self, message: Logged, now: float, out: CoordinatorOutput) -> None:
        if message.step < unstarted(self.committed):
            self.course.logs.heard(message)

    def _log_broken(self, message: LogBroken, now: float, out: CoordinatorOutput) -> None:
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

    def _arrive(self, message: BarrierReached, now: float, out: CoordinatorOutput) -> None:
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

    def _terminate(self, message: Terminate, now: float, out: CoordinatorOutput) -> None:
        who = (
            f"the supervisor of {self.course.attendance.named(message.rank)} on host {message.host} got "
            if message.host
            else ""
        )
        self._end_planned(f"{who}{message.reason}", out)

    def _leave(self, message: Leaving, now: float, out: CoordinatorOutput) -> None:
        if message.all:
            self._end_planned(f"{self.course.attendance.named(message.rank)}: {message.reason}", out)
        else:
            departures.leave(self.course, [message], now, out)

    def _end_planned(self, why: str, out: CoordinatorOutput) -> None:
        out.say("terminate", f"{why}: the job ends at the next commit")
        ends.end_planned(self.course, why, out)

    def _note(self, note: Note, now: float, out: CoordinatorOutput) -> None:
        if note.kind == "checkpoint" and isinstance(path := note.details.get("path"), str):
            self.course.ending.saved(path)
        if note.is_known:
            out.events.append(Event(note.kind, note.text, {**note.details, "rank": note.rank}))


Handler = Callable[[Membership, Any, float, CoordinatorOutput], object]

# Each gets the state, a message of that class, the time in seconds, and where to put what it leads to.
OF_MEMBERS: dict[type, Handler] = {
    Heartbeat: lambda its, message, now, out: its.course.heartbeat(message, out),
    SupervisorHeartbeat: lambda its, message, now, out: (
        its.course.attendance.failure_detector.supervisor_heartbeat(message)
    ),
    ComputeTime: lambda its, message, now, out: its.course.steps.add_compute_time(message),
    Stepped: lambda its, message, now, out: its.course.step(message, now, out),
    Contribution: lambda its, *said: its._contribute(*said),
    Fingerprint: lambda its, message, now, out: its.course.steps.add_fingerprint(message),
    Ready: lambda its, *said: its._enrol(*said),
    Serving: lambda its, message, now, out: returns.serving(its.course, message, out),
    StateHash: lambda its, message, now, out: returns.state_hash(its.course, message, now, out),
    SurvivorReport: lambda its, message, now, out: resuming.report(its.course, message, now, out),
    OutOfData: lambda its, message, now, out: contributing.out_of_data(its.course, message, now, out),
    BarrierReached: lambda its, *said: its._arrive(*said),
    CheckpointLoaded: lambda its, *said: its._load(*said),
    Resized: lambda its, *said: its._resize(*said),
    Leaving: lambda its, *said: its._leave(*said),
    Through: lambda its, message, now, out: goodbyes.through(its.course, message, out),
    Left: lambda its, message, now, out: departures.goodbye(its.course, message, now, out),
    Vanishing: lambda its, message, now, out: vanishing.vanish(its.course, message),
    Exited: lambda its, message, now, out: its.course.died(message, now, out),
    Unguarded: lambda its, message, now, out: its.course.unguarded(message, out),
    Missing: lambda its, *said: its._send_again(*said),
    Terminate: lambda its, *said: its._terminate(*said),
    Fatal: lambda its, message, now, out: ends.end(its.course, message.text, out),
    Crashed: lambda its, message, now, out: its.course.attendance.crashed(message, out),
    Note: lambda its, *said: its._note(*said),
    Durable: lambda its, message, now, out: replays.durable(its.course, message, out),
    Logged: lambda its, *said: its._logged(*said),
    LogBroken: lambda its, *said: its._log_broken(*said),
    Replaying: lambda its, message, now, out: replays.progress(its.course, message, now, out),
    Accompanied: lambda its, message, now, out: replays.accompanied(its.course, message, now, out),
    CaughtUp: lambda its, message, now, out: replays.accompanied(its.course, message, now, out),
    Unreplayable: lambda its, message, now, out: replays.unreplayable(its.course, message, now, out),
    LogsServed: lambda its, message, now, out: its.course.log_places.served(message),
    StrangersAtLogs: lambda its, message, now, out: out.say("stranger", message.text, address=message.address),
}
"""What is done with a message of each class."""

OF_NEWCOMERS: dict[type, Handler] = {
    each: OF_MEMBERS[each]
    for each in (Replaying, Unreplayable, LogBroken, Through, SurvivorReport, Unguarded, StateHash)
} | {
    Exited: lambda its, message, now, out: returns.died(its.course, message, now, out),
    CatchUp: lambda its, message, now, out: returns.catch_up(its.course, message, now, out),
    CaughtUp: lambda its, message, now, out: returns.caught_up(its.course, message, now, out),
    Heartbeat: lambda its, *said: its._heartbeat_of_newcomer(*said),
    SupervisorHeartbeat: lambda its, *said: its._supervisor_heartbeat_of_newcomer(*said),
    Fatal: lambda its, *said: its._error_of_newcomer(*said),
    Crashed: lambda its, *said: its._error_of_newcomer(*said),
    Note: lambda its, *said: its._note_of_newcomer(*said),
}
"""The same, for a worker that is no member yet; nothing else that it says counts."""
