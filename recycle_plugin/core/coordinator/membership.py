"""What each message to the coordinator leads to: its decisions, as a state machine without clock, threads or sockets.

Messages go in, addressed messages and events come out; ``runtime.control.coordinator`` carries them.  Who takes part, what is committed and
how the job goes on is decided in core/coordinator/course.py.  Here, around that, is what workers agree on before they start, and between them:

* A job starts when all ranks are there, and want the same (core/coordinator/enrolment.py).
* Meetings and complaints that belong to an older generation, or to one that has lost somebody, are dropped; what is said of a step is of that
  step, whoever is live, and the first complete word on it stays (core/messages/contributions.py).
* What all have to hear of at one step, a rejection, a checkpoint or another batch size, is a generation that holds at once.

All that it knows is in its attributes, each thing in one place, and survives core/coordinator/state_dump.py.
"""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite

from recycle_plugin.core.coordinator.complaints import Complaints
from recycle_plugin.core.coordinator.course import Course
from recycle_plugin.core.coordinator.enrolment import Enrolment, weak_points
from recycle_plugin.core.coordinator.output import WORKERS, Event, Output
from recycle_plugin.core.messages.job_spec import Job
from recycle_plugin.core.messages.protocol import (
    Arrived,
    Beat,
    Contribution,
    Crashed,
    End,
    Exited,
    Fatal,
    Fingerprint,
    Leaving,
    Left,
    Loaded,
    Met,
    Missing,
    Note,
    Pace,
    Pulse,
    Ready,
    Report,
    Resized,
    Stepped,
    Terminate,
    Unguarded,
)  # fmt: skip
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.deadlines import shown
from recycle_plugin.core.vocabulary.describe import BROKEN
from recycle_plugin.core.vocabulary.roster import FailureDomain, Roster, WorkerId


class Membership:
    """Who takes part, which step is committed, and what everybody does next."""

    def __init__(self, ranks: int, domain: FailureDomain = FailureDomain.SEAT) -> None:
        self.course = Course(domain)
        self._enrolment = Enrolment(ranks)
        self._complaints = Complaints()

    # --- what is known ---------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        return self.course.attendance.started

    @property
    def roster(self) -> Roster:
        """Who takes part."""
        return self.course.roster

    @property
    def lost(self) -> set[WorkerId]:
        return self.course.attendance.lost

    @property
    def unreachable(self) -> set[WorkerId]:
        """Lost workers of which nobody knows whether they are dead."""
        return self.course.attendance.unreachable

    @property
    def ended(self) -> End | None:
        """How, once that is decided."""
        return self.course.ending.ended

    @property
    def committed(self) -> int:
        """The last step that stays."""
        return self.course.committed

    @property
    def generation(self) -> int:
        """The newest."""
        return self.course.regrouping.generation

    @property
    def regrouping(self) -> int | None:
        """The generation that members are reporting for at once, if any."""
        return self.course.regrouping.at_once

    # --- messages in -----------------------------------------------------------------------------

    def receive(self, message: object, now: float) -> Output:
        """Handle one message that arrived at ``now`` (seconds)."""
        out = Output()
        if not self.course.attendance.is_heard(message):
            return out
        match message:
            case Ready():
                self._enrol(message, now, out)
            case Report():
                self.course.report(message, now, out)
            case Stepped():
                self.course.step(message, now, out)
            case Contribution():
                self._contribute(message, now, out)
            case Arrived():
                self._arrive(message, out)
            case Loaded():
                self._load(message, now, out)
            case Resized():
                self._resize(message, now, out)
            case Pace():
                self.course.steps.add_pace(message)
            case Fingerprint():
                self.course.steps.add_fingerprint(message)
            case Leaving():
                self.course.leave(message, now, out)
            case Left():
                self.course.goodbye(message, now, out)
            case Exited():
                self.course.died(message, now, out)
            case Unguarded():
                self.course.unguarded(message, out)
            case Beat():
                self.course.beat(message, out)
            case Pulse():
                self.course.attendance.watch.pulse(message)
            case Missing():
                self._send_again(message, now, out)
            case Terminate():
                self._terminate(message, out)
            case Fatal():
                self.course.end(message.text, out)
            case Crashed():
                self.course.attendance.crashed(message, out)
            case Note():
                self._note(message, out)
        return out

    def greet(self, worker: WorkerId, host: str) -> Output:
        """A process on ``host`` has connected as ``worker``; if it can't take part, it hears so before it does anything."""
        out = Output()
        if self.ended is None and (self.started or worker.incarnation):
            self._turn_away(worker, host, out)
        return out

    def fail(self, text: str) -> Output:
        """Nobody can go on, for a reason that is no worker's."""
        out = Output()
        self.course.end(text, out)
        return out

    def connection_lost(self, worker: WorkerId, now: float) -> Output:
        """The worker's connection broke without a goodbye: it is gone, or cut off, which is the same to its peers."""
        out = Output()
        self.course.lose(worker, Cause.DIED, BROKEN, now, now, out)
        return out

    def tick(self, now: float) -> Output:
        """Time passes; to be told every ``core.coordinator.failure_detector.TICK_S``."""
        out = Output()
        self.course.tick(now, out)
        return out

    def regroup_overdue(self, seconds: float) -> Output:
        """The deadline of a regrouping has passed."""
        out = Output()
        self.course.overdue(seconds, out)
        return out

    # --- joining ---------------------------------------------------------------------------------

    def _enrol(self, ready: Ready, now: float, out: Output) -> None:
        if self.started or self._enrolment.is_stranger(ready.worker):
            self._turn_away(ready.worker, ready.member.host, out)
            return
        if not self._enrolment.add(ready) or self.ended is not None:
            return
        contradiction = self._enrolment.contradiction()
        if contradiction is not None:
            self.course.end(contradiction, out)
            return
        self._begin(ready.job, ready.stepped, now, out)

    def _turn_away(self, worker: WorkerId, host: str, out: Output) -> None:
        self.course.attendance.turn_away(worker, host, self.committed + 1, out)

    def _begin(self, job: Job, stepped: int, now: float, out: Output) -> None:
        shape, roster = job.shape, self._enrolment.roster
        self.course.begin(roster, job, stepped)
        seats = {str(seat): roster.holder(seat).rank for seat in roster.seats}
        out.say("start", f"{shape.replicas} replicas of {shape.stages} stages, {shape.micro_batches} micro-batches each; run folder {job.run_dir}",
                job=asdict(job), seats=seats, hosts=sorted({member.host for member in roster}))
        out.say("deadlines", f"who waits how long for what, in the order in which it fires:\n{shown(job.deadlines.table)}", table=[row._asdict() for row in job.deadlines.table])
        for kind, text, details, refused in weak_points(job, roster, shape):
            self.course.end(text, out) if refused else out.say(kind, text, **details)
        if self.ended is None:
            self.course.regroup("start", now, out)

    # --- in a step -------------------------------------------------------------------------------

    def _contribute(self, message: Contribution, now: float, out: Output) -> None:
        norm = self.course.steps.contribute(message, out)
        if norm is not None:
            self._reject(message.step, norm, now, out)

    def _reject(self, step: int, norm: float, now: float, out: Output) -> None:
        """Everybody has to hear that ``step`` can't stay as it was applied, and takes it back; some gradients leave nothing to go on with."""
        verdicts, safe_point = self.course.steps.verdicts, self.course.ending.safe_point
        if verdicts.hopeless(norm):
            self.course.end(f"the gradient norm of step {step} is {norm}. {safe_point}; to skip such steps set recycle.nonfinite to \"skip\"", out)
            return
        out.say("rejected", f"step {step} is taken back and {'clipped' if isfinite(norm) else 'skipped'}: its gradient norm is {norm:.4g} "
                f"({verdicts.rejected} of {verdicts.judged} steps so far)", step=step, norm=norm, rejected=verdicts.rejected, judged=verdicts.judged)
        if not self.course.halted:
            self.course.regroup(f"rejection of step {step}", now, out)

    def _send_again(self, missing: Missing, now: float, out: Output) -> None:
        """A line between two live workers has lost something: all meet again, over new lines, and it is sent once more.

        Where that does not help, the one goes that is to be doubted (core/coordinator/complaints.py); the job ends where nobody knows which.
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
            self.course.end(f"{why}, {tries} times, and nobody in it is lost: see to the network between their hosts, or let GLOO_SOCKET_IFNAME name "
                             f"the interface that connects them. {self.course.ending.safe_point}", out)

    # --- between steps ---------------------------------------------------------------------------

    def _arrive(self, message: Arrived, out: Output) -> None:
        values = self.course.meet(message, message.place, message.values, out)
        if values is not None:
            out.tell(WORKERS, Met(message.place, values, unstarted(self.committed)))

    def _load(self, message: Loaded, now: float, out: Output) -> None:
        if self.course.meet(message, "the state of a checkpoint", {}, out) is not None:
            self.course.regroup("a checkpoint was loaded", now, out)

    def _resize(self, message: Resized, now: float, out: Output) -> None:
        """It counts from the first who says it, since all have met before: also where one of them dies now."""
        self.course.resize(message, out)
        if self.course.meet(message, "another batch size", {}, out) is not None:
            self.course.regroup("another batch size", now, out)

    def _terminate(self, message: Terminate, out: Output) -> None:
        who = f"the supervisor of {self.course.attendance.named(message.rank)} on host {message.host} got " if message.host else ""
        out.say("terminate", f"{who}{message.reason}: the job ends at the next commit")
        self.course.end_planned(f"{who}{message.reason}", out)

    def _note(self, note: Note, out: Output) -> None:
        if note.kind == "checkpoint":
            self.course.ending.checkpoint = note.details["path"]
        out.events.append(Event(note.kind, note.text, {"rank": note.rank, **note.details}))
