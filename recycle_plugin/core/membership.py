"""The coordinator's decisions, as a state machine without clock, threads or sockets.

Messages go in, addressed messages and events come out; ``runtime.coordinator`` carries them.
The rules it keeps:

* A *generation* is a version of the membership.  A failure makes one that holds at once; a planned
  leave makes one that holds from a step which nobody can have started.
* Every member of a new generation stops and reports how many steps it has applied, what it holds of
  unfinished ones, and the hash of the plan it made.  When all have, everybody learns all of it; the steps
  up to the smallest count are committed, and the rest is finished from what is held (core/lineage.py).
* A step is committed when every live worker has applied it.
* Reports, meetings and complaints that belong to an older generation are dropped; what is said of a step is of that step, whoever is
  live, and the first complete word on it stays (core/contributions.py).
* Who is stopped or stuck (core/watch.py) is lost as whoever dies, and *fenced*: its supervisor kills it, and it hears so
  itself, should it wake up.
* Of the seats that are not known to be dead a new generation has a majority, or half with this coordinator among them;
  else this is the wrong side of a partition, and it ends.  A death is known when a supervisor saw the process end.  The
  broken connection mostly comes first, so there is a grace before deciding, in which nothing is committed.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite
from typing import Iterable

from recycle_plugin.core.complaints import Complaints
from recycle_plugin.core.enrolment import Enrolment, weak_points
from recycle_plugin.core.escalation import Escalation
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.meeting import Meetings
from recycle_plugin.core.output import SUPERVISORS, WORKERS, Event, Output
from recycle_plugin.core.protocol import (
    Arrived, Beat, Contribution, End, Exited, Fatal, Fence, Fingerprint, Generation, Leaving, Left, Loaded, Member, Met, Missing,
    Note, Over, Pace, Pulse, Ready, Report, Resized, Resume, Stepped, Terminate, TOO_SLOW,
)  # fmt: skip
from recycle_plugin.core.steps import Steps
from recycle_plugin.core.topology import ClusterView, Topology
from recycle_plugin.core.verdict import Verdicts
from recycle_plugin.core.watch import Watch

OF_MEMBERS = (Report, Fingerprint, Pace, Stepped, Contribution, Arrived, Loaded, Resized, Leaving, Left, Beat, Missing, Fatal, Note)  # nothing of this counts from a lost worker


class Membership:
    """Who takes part, which step is committed, and what everybody does next."""

    def __init__(self, ranks: int) -> None:
        self.members: dict[int, Member] = {}
        self.generation = -1
        self._in_force = -1
        self.started = False
        self.ended: End | None = None
        self.checkpoint = ""
        self.left: set[int] = set()
        self.lost: set[int] = set()
        self.dead: set[int] = set()  # of the lost ones, those known to be
        self.watch = Watch()
        self._topology: Topology | None = None
        self._enrolment = Enrolment(ranks)
        self._reports: dict[int, Report] = {}
        self._awaiting: Generation | None = None
        self._outnumbered_at: float | None = None  # by the watch's clock: since then too few are left to go on
        self._finishing = False
        self._leaving: dict[int, str] = {}
        self._complaints = Complaints()
        self._steps = Steps()
        self._meetings = Meetings()
        self._escalation = Escalation()
        self._code = 0

    # --- messages in -----------------------------------------------------------------------------

    def receive(self, message: object, now: float) -> Output:
        """Handle one message that arrived at ``now`` (seconds)."""
        out = Output()
        if isinstance(message, OF_MEMBERS) and message.rank in self.lost:
            return out  # it may have been stopped, or cut off
        match message:
            case Ready():
                self._enrol(message, now, out)
            case Report():
                self._report(message, now, out)
            case Stepped():
                self._step(message, now, out)
            case Contribution():
                self._contribute(message, now, out)
            case Arrived():
                self._arrive(message, out)
            case Loaded():
                self._load(message, now, out)
            case Resized():
                self._resize(message, now, out)
            case Pace():
                self._steps.add_pace(message)
            case Fingerprint():
                self._steps.add_fingerprint(message)
            case Leaving():
                self._leave(message, now, out)
            case Left():
                self._goodbye(message, now, out)
            case Exited():
                self._exit(message, now, out)
            case Beat():
                out.tell(message.rank, self.watch.beat(message))
            case Pulse():
                self.watch.pulse(message)
            case Missing():
                self._send_again(message, now, out)
            case Terminate():
                out.say("terminate", f"{message.reason}: the job ends at the next commit")
                self._end_planned(message.reason, out)
            case Fatal():
                self._end(message.text, out)
            case Note():
                self._note(message, out)
        return out

    def connection_lost(self, rank: int, now: float) -> Output:
        """The worker's connection broke without a goodbye: it is gone, or cut off, which is the same to its peers."""
        out = Output()
        self._lose(rank, "its connection broke", now, now, out)
        return out

    def tick(self, now: float) -> Output:
        """Time passes; to be told every ``core.watch.TICK_S``."""
        out = Output()
        for rank, why in self.watch.tick(now).items() if not (self.ended and self.ended.failed) else ():
            self._give_up(rank, why, now, out)
        since = self._outnumbered_at
        if since is not None and self.watch.clock - since > self.watch.progress_s:
            self._end(self._cut_off(), out)
        return out

    def regroup_overdue(self, seconds: float) -> Output:
        """The deadline of a regrouping has passed."""
        out = Output()
        if self._awaiting is not None:
            missing = sorted(m.seat for m in self._awaiting.members if m.rank not in self.left | set(self._reports))
            self._end(
                f"regrouping to generation {self._awaiting.number} waited {seconds:.0f} s for the report of "
                f"seat{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}; raise recycle.regroup_timeout_s if "
                "the training script may pause that long",
                out,
            )
        return out

    @property
    def committed(self) -> int:
        """The last step that stays."""
        return self._steps.committed

    @property
    def regrouping(self) -> int | None:
        """The generation that members are reporting for at once, if any."""
        return self._awaiting.number if self._awaiting and not self._awaiting.from_step else None

    @property
    def unreachable(self) -> set[int]:
        """Lost ranks of which nobody knows whether they are dead."""
        return self.lost - self.dead

    @property
    def _through(self) -> bool:
        """All steps up to a planned end are committed."""
        return self.ended is not None and not self.ended.failed and self.committed >= self.ended.step - 1

    @property
    def _halted(self) -> bool:
        """The membership in force has lost somebody."""
        return self.regrouping is not None or self._outnumbered_at is not None

    # --- joining ---------------------------------------------------------------------------------

    def _enrol(self, ready: Ready, now: float, out: Output) -> None:
        if not self._enrolment.add(ready) or self.started or self.ended is not None:
            return
        contradiction = self._enrolment.contradiction()
        if contradiction is not None:
            self._end(contradiction, out)
            return
        self._begin(ready.job, ready.stepped, now, out)

    def _begin(self, job: dict, stepped: int, now: float, out: Output) -> None:
        self._topology = Topology(job["replicas"], job["stages"], job["micro_batches"])
        self.members = self._enrolment.members
        self.started = True
        self._escalation = Escalation(job.get("max_slowdown"))
        self.watch = Watch(job.get("progress_timeout_s", inf), job.get("idle_timeout_s", inf), job.get("heartbeat_timeout_s", inf), self.watch.clock)
        self.watch.admit(self.members)
        shape = self._topology
        verdicts = Verdicts(shape.stages, job["clipping"], job["nonfinite"] == "skip")
        self._steps = Steps(stepped, verdicts, job.get("rebalance", False))
        out.say("start", f"{shape.replicas} replicas of {shape.stages} stages, {shape.micro_batches} micro-batches each; run folder {job['run_dir']}",
                job=job, seats={str(m.seat): rank for rank, m in self.members.items()}, hosts=sorted({m.host for m in self.members.values()}))
        for text, details, refused in weak_points(job, self.members.values(), shape):
            self._end(text, out) if refused else out.say("warning", text, **details)
        if self.ended is None:
            self._regroup("start", now, out)

    # --- regrouping ------------------------------------------------------------------------------

    def _regroup(self, cause: str, now: float, out: Output, from_step: int = 0) -> None:
        """Publish the membership; with ``from_step`` the leaving workers stay members until then."""
        self.generation += 1
        gone = self._leaving if from_step else ()
        members = tuple(m for rank, m in sorted(self.members.items()) if rank not in gone)
        slowness = tuple(sorted(self._steps.paces.percent.items()))
        self._awaiting = Generation(self.generation, members, from_step, cause, now, slowness)
        self._reports.clear()
        if not from_step:
            self._meetings.regrouped()
        out.tell(WORKERS, self._awaiting)

    def _report(self, report: Report, now: float, out: Output) -> None:
        generation = self._awaiting
        if generation is None or report.generation != generation.number:
            return
        self._reports[report.rank] = report
        self._complete(generation, now, out)

    def _complete(self, generation: Generation, now: float, out: Output) -> None:
        """Go on if everybody has reported who still can: whoever has gone since has nothing to do with what is left."""
        if not self._reports or {member.rank for member in generation.members if member.rank in self.members} - set(self._reports):
            return
        digests = {report.digest for report in self._reports.values()}
        if len(digests) > 1:
            self._end(f"workers made different plans for generation {generation.number}: {', '.join(sorted(digests))}", out)
            return
        self._go_on(generation, now, out)

    def _go_on(self, generation: Generation, now: float, out: Output) -> None:
        counts = [report.stepped for report in self._reports.values()]
        if any(report.loaded for report in self._reports.values()) and not self._rewind(counts, out):
            return
        reports = {str(member.seat): self._reports[member.rank] for member in generation.members if member.rank in self._reports}
        held, drawn = ({seat: getattr(report, what) for seat, report in reports.items()} for what in ("held", "drawn"))
        committed, norm, void = self._steps.agree(counts, held)
        ahead = max(counts) - committed
        self._awaiting = None
        self._in_force = generation.number
        self._meetings.regrouped()  # after a planned change too
        if committed > self.committed:
            self._commit(committed, now, out)
        kept = {member.rank for member in generation.members if member.rank in self.members}
        self.members = {rank: member for rank, member in self.members.items() if rank in kept}
        self._steps.resume(kept, committed)
        out.tell(WORKERS, Resume(generation.number, committed, held, norm, void, drawn))
        slowest = max(self._reports.values(), key=lambda report: sum(report.timings.values()))
        throughput = self._escalation.throughput(slowest.period_us)
        out.say("resume", f"{len(kept)} workers go on with step {committed + 1}" + "; some have applied it" * bool(ahead),
                generation=generation.number, committed=committed, ahead=ahead, regroup_s=round(now - generation.at, 4),
                digest=slowest.digest, timings=slowest.timings, throughput=throughput)
        self._escalate(throughput, out)
        if self._leaving.keys() & self.members.keys() and not generation.from_step:
            self._plan_leave(now, out)
        self._compare_replicas(now, out)

    def _rewind(self, counts: list[int], out: Output) -> bool:
        """All go on from a checkpoint's step, earlier or later than the last one."""
        alike = len(set(counts)) == 1 and all(report.loaded for report in self._reports.values())
        if alike:
            self._steps.committed = counts[0]
            out.say("loaded", f"everybody goes on from a checkpoint of step {self.committed}", step=self.committed)
        else:
            self._end(f"workers have loaded checkpoints of different steps: {', '.join(map(str, sorted(set(counts))))}", out)
        return alike

    def _escalate(self, throughput: float, out: Output) -> None:
        reason = self._escalation.reason(throughput)
        if reason is None or self.ended is not None:
            return
        self._end_planned(reason, out, TOO_SLOW)
        out.say("escalate", f"{reason}: the job ends with a checkpoint of step {self.ended.step - 1} and exit code {TOO_SLOW}",
                throughput=throughput, step=self.ended.step - 1, code=TOO_SLOW)

    # --- steps -----------------------------------------------------------------------------------

    def _step(self, stepped: Stepped, now: float, out: Output) -> None:
        if stepped.rank not in self.members or self._halted or self.ended and self.ended.failed:
            return
        for step in self._steps.apply(stepped, self.members):
            self._commit(step, now, out)
        self._compare_replicas(now, out)
        self._rebalance(now, out)

    def _commit(self, step: int, now: float, out: Output) -> None:
        self._complaints.committed()
        self.watch.committed(now)
        self._steps.commit(step, len(self.members), now, out)

    def _compare_replicas(self, now: float, out: Output) -> None:
        """Whoever differs from a majority is lost as if it had died; what it has contributed since it was right is in everybody's
        state alike, and stays.  Without a majority nobody knows which state to go on with."""
        for mismatch in self._steps.mismatches(self.members.values()):
            if not mismatch.majority:
                self._end(f"{mismatch}. {self._safe_point()}", out)
                return
            for rank in [rank for rank, member in self.members.items() if member.seat in mismatch.seats]:
                self._give_up(rank, str(mismatch), now, out)

    def _rebalance(self, now: float, out: Output) -> None:
        """Plan anew, for a step that nobody has started, where a worker has become slow, or is so no longer."""
        paces = self._steps.paces
        paces.committed(self.committed, self.members.values())
        if self._halted or self._awaiting is not None or self.ended is not None:
            return
        for seat, percent in (news := paces.news()).items():
            out.say("rebalance", f"seat {seat} needs {percent}% of the time that its stage's others need: work is dealt out anew", seat=str(seat), percent=percent)
        if news:
            self._regroup(f"pace of {', '.join(map(str, news))}", now, out, from_step=self.committed + 3)

    def _contribute(self, message: Contribution, now: float, out: Output) -> None:
        norm = self._steps.contribute(message, out)
        if norm is not None:
            self._reject(message.step, norm, now, out)

    def _reject(self, step: int, norm: float, now: float, out: Output) -> None:
        """Everybody has to hear that ``step`` can't stay as it was applied, and takes it back; some gradients leave nothing to go on with."""
        verdicts = self._steps.verdicts
        if verdicts.hopeless(norm):
            self._end(f"the gradient norm of step {step} is {norm}. {self._safe_point()}; to skip such steps set recycle.nonfinite to \"skip\"", out)
            return
        out.say("rejected", f"step {step} is taken back and {'clipped' if isfinite(norm) else 'skipped'}: its gradient norm is {norm:.4g} "
                f"({verdicts.rejected} of {verdicts.judged} steps so far)", step=step, norm=norm, rejected=verdicts.rejected, judged=verdicts.judged)
        if not self._halted:
            self._regroup(f"rejection of step {step}", now, out)

    def _arrive(self, message: Arrived, out: Output) -> None:
        values = self._together(message)
        if values is not None:
            out.tell(WORKERS, Met(message.place, values, self.committed + 3))  # nobody can have started that: see _plan_leave

    def _together(self, message: Arrived) -> dict | None:
        """What all have brought along, if with this one all are there."""
        if message.generation != self._in_force or self._halted:
            return None
        return self._meetings.arrive(message, self.members.keys())

    def _load(self, message: Loaded, now: float, out: Output) -> None:
        if self._together(Arrived(message.rank, message.generation, "the state of a checkpoint", {})) is not None:
            self._regroup("a checkpoint was loaded", now, out)

    def _resize(self, message: Resized, now: float, out: Output) -> None:
        """The first who says it says it for all, since all have met before: also where one of them dies now."""
        if message.micro_batches != self._topology.micro_batches:
            self._topology = replace(self._topology, micro_batches=message.micro_batches)
            self._escalation.resize(message.full_us)
            out.say("batch", f"from step {self.committed + 1} on {message.batch} samples a step, {message.micro_batches} micro-batches of each replica",
                    step=self.committed + 1, batch=message.batch, micro_batches=message.micro_batches)
        if self._together(Arrived(message.rank, message.generation, "another batch size", {})) is not None:
            self._regroup("another batch size", now, out)

    # --- leaving and dying ------------------------------------------------------------------------

    def view(self, members: Iterable[Member]) -> ClusterView:
        assert self._topology is not None
        return ClusterView(self._topology, frozenset(member.seat for member in members))

    def _leave(self, message: Leaving, now: float, out: Output) -> None:
        member = self.members.get(message.rank)
        if member is None or message.rank in self._leaving or self.ended is not None:
            return
        self._leaving[message.rank] = message.reason
        out.say("leaving", f"seat {member.seat} leaves at the next commit: {message.reason}", seat=str(member.seat))
        if not self._halted:
            self._plan_leave(now, out)

    def _plan_leave(self, now: float, out: Output) -> None:
        """Announce a generation for a step that nobody can have started.

        A worker applies step c+2 only after it knows c+1 committed (core/step.py), which this
        coordinator says after this announcement: so everybody reads it before starting c+3.
        """
        stay = [m for rank, m in self.members.items() if rank not in self._leaving]
        empty = self.view(stay).empty_stages()
        if empty:
            self._end_planned(f"stage {empty[0]} would have no worker left", out)
            return
        leavers = ", ".join(str(self.members[rank].seat) for rank in sorted(self._leaving) if rank in self.members)
        self._regroup(f"planned leave of {leavers}", now, out, from_step=self.committed + 3)

    def _goodbye(self, message: Left, now: float, out: Output) -> None:
        rank, self._code = message.rank, max(self._code, message.code)
        self.left.add(rank)
        early = self._leaving.pop(rank, None) is not None and not self._through
        planned = early or self.ended is not None
        member = self.members.pop(rank, None)
        self._steps.forget(rank)
        self.watch.dismiss(rank)
        self._finishing |= member is not None and not early
        if self.started and not (self.ended and self.ended.failed):
            out.say("left", f"worker {rank} has left after step {self.committed}" + " as planned" * planned, rank=rank)
        self._await_without(member, early, now, out)
        self._finish_if_empty(out)

    def _await_without(self, member: Member, early: bool, now: float, out: Output) -> None:
        """``member`` has gone before it could hear of the membership that the others may be reporting for."""
        if self._awaiting is None or member not in self._awaiting.members:
            return
        if not self.members:
            self._awaiting = None
        elif not early:  # all steps are committed, and its report is not needed
            self._complete(self._awaiting, now, out)
        elif self.view(self.members.values()).empty_stages():
            self._end(f"stage {member.seat.stage} has no live worker left. {self._safe_point()}", out)
        else:
            self._regroup(f"planned leave of {member.seat}", now, out)

    def _exit(self, message: Exited, now: float, out: Output) -> None:
        how = f"was killed by signal {-message.code}" if message.code < 0 else f"exited with code {message.code}"
        self.dead.add(message.rank)
        if message.rank in self.lost:
            out.say("confirmed", f"rank {message.rank} {how}, says its supervisor", rank=message.rank, code=message.code)
            if self._outnumbered_at is not None and self.ended is None:
                self._go_on_without(f"death of rank {message.rank}", now, out)
        self._lose(message.rank, how, now, message.at, out)

    def _send_again(self, missing: Missing, now: float, out: Output) -> None:
        """A line between two live workers has lost something: all meet again, over new lines, and it is sent once more.

        Where that does not help, the two can't work together, and the one that is not heard goes; the job ends where nobody knows which.
        """
        if missing.generation != self._in_force or self._halted:
            return
        complaint = self._complaints.add(missing, self.members)
        if complaint is None:
            return
        why, tries, source = complaint
        if complaint.again:
            out.say("warning", f"{why}: all meet again, over new connections")
            self._regroup(why, now, out)
        elif source is not None:
            self._give_up(source, f"{why}, for the {tries}th time", now, out)
        else:
            self._end(f"{why}, {tries} times, and nobody in it is lost: see to the network between their hosts, or let GLOO_SOCKET_IFNAME name the interface "
                      f"that connects them. {self._safe_point()}", out)

    def _give_up(self, rank: int, why: str, now: float, out: Output) -> None:
        """Lose a worker that may be alive, and see to it that it does nothing more."""
        for whom in (SUPERVISORS, rank):
            out.tell(whom, Fence(rank, why))
        self._lose(rank, why, now, now, out)

    def _lose(self, rank: int, how: str, now: float, at: float, out: Output) -> None:
        if rank in self.lost or rank in self.left or self.ended and self.ended.failed:
            return
        if self.started and rank not in self.members:
            self._depart(rank, out)
            return
        self.lost.add(rank)
        if not self.started:
            self._end(f"worker {rank} {how} before training started", out)
            return
        member = self.members.pop(rank)
        self._leaving.pop(rank, None)
        self._steps.forget(rank)
        self.watch.dismiss(rank)
        view = self.view(self.members.values())
        out.say("lost", f"seat {member.seat} (rank {rank}) lost: {how}. {self._left_over(view, member.seat)}",
                seat=str(member.seat), rank=rank, how=how, seen_at=at)
        if self._finishing or self._through:  # all steps are committed, and the training script is through
            self._await_without(member, False, now, out)
            self._finish_if_empty(out)
        elif view.empty_stages():
            self._end(f"stage {member.seat.stage} has no live worker left. {self._safe_point()}", out)
        elif self.members:
            self._go_on_without(f"loss of {member.seat}", now, out)

    def _depart(self, rank: int, out: Output) -> None:
        """Its planned leave holds, and it is gone without the goodbye: nobody needs anything of it any more."""
        self.left.add(rank)
        self._leaving.pop(rank, None)
        self.watch.dismiss(rank)
        out.say("left", f"worker {rank} has left after step {self.committed} as planned, without a word", rank=rank)
        self._finish_if_empty(out)

    def _go_on_without(self, cause: str, now: float, out: Output) -> None:
        """... if those left are enough, which the news of a death that is known can make them."""
        if len(self.unreachable) <= len(self.members):
            self._outnumbered_at = None
            self._regroup(cause, now, out)
        elif self._outnumbered_at is None:
            self._outnumbered_at, self._awaiting = self.watch.clock, None

    def _cut_off(self) -> str:
        return (f"{len(self.unreachable)} workers can't be reached and aren't known to be dead, and only {len(self.members)} are left here: "
                f"this may be the smaller side of a broken network. {self._safe_point()}")

    @staticmethod
    def _left_over(view: ClusterView, seat: Seat) -> str:
        live = view.live_replicas(seat.stage)
        count = {0: "no live worker", 1: "one live worker"}.get(len(live), f"{len(live)} live workers")
        return f"Stage {seat.stage} has {count} left"

    def _safe_point(self) -> str:
        return f"Last checkpoint: {self.checkpoint}" if self.checkpoint else "No checkpoint was saved"

    # --- ending ----------------------------------------------------------------------------------

    def _end_planned(self, reason: str, out: Output, code: int = 0) -> None:
        if not self.started:
            self._end(reason, out)
        elif self.ended is None:
            self.ended = End(self.committed + 3, reason, failed=False, code=code)
            out.tell(WORKERS, self.ended)

    def _end(self, reason: str, out: Output) -> None:
        if self.ended is None or not self.ended.failed:
            self.ended = End(0, reason, failed=True)
            self._awaiting = None
            out.say("end", f"the job ends: {reason}")
            out.tell(WORKERS, self.ended)
            out.tell(SUPERVISORS, Over(1))

    def _finish_if_empty(self, out: Output) -> None:
        if not self.members and self.started and not (self.ended and self.ended.failed):
            if (verdicts := self._steps.verdicts).judged:
                out.say("validated", f"{verdicts.rejected} of {verdicts.judged} steps were rejected and applied again", rejected=verdicts.rejected, judged=verdicts.judged)
            out.say("finished", f"all workers have left after step {self.committed}", step=self.committed)
            out.tell(SUPERVISORS, Over(self._code))

    def _note(self, note: Note, out: Output) -> None:
        if note.kind == "checkpoint":
            self.checkpoint = note.details["path"]
        out.events.append(Event(note.kind, note.text, {"rank": note.rank, **note.details}))
