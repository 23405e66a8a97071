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
* A worker is one process (core/roster.py).  Who is lost stays lost, and a later process of its rank is another worker; nobody can join a
  job that has started, and who asks to hears so at once.  A loss takes its failure domain with it.

All that it knows is in its attributes, and survives core/dump.py.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from math import isfinite

from recycle_plugin.core.complaints import Complaints
from recycle_plugin.core.enrolment import Enrolment, weak_points
from recycle_plugin.core.escalation import Escalation
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.job import Job
from recycle_plugin.core.meeting import Meetings
from recycle_plugin.core.output import SUPERVISORS, WORKERS, Event, Output
from recycle_plugin.core.protocol import (
    Arrived, Beat, Contribution, End, Exited, Fatal, Fence, Fingerprint, Generation, Leaving, Left, Loaded, Met, Missing,
    Note, Over, Pace, Pulse, Ready, Report, Resized, Resume, Stepped, Terminate, TOO_SLOW,
)  # fmt: skip
from recycle_plugin.core.roster import FailureDomain, Member, Roster, WorkerId
from recycle_plugin.core.shards import drawn_by_all, held_by_all
from recycle_plugin.core.step import unstarted
from recycle_plugin.core.steps import Steps
from recycle_plugin.core.topology import ClusterView, Topology
from recycle_plugin.core.verdict import Verdicts
from recycle_plugin.core.watch import Watch

OF_MEMBERS = (Report, Fingerprint, Pace, Stepped, Contribution, Arrived, Loaded, Resized, Leaving, Left, Beat, Missing, Fatal, Note)
"""Nothing of this counts from a worker that is lost, or has come too late."""


class Membership:
    """Who takes part, which step is committed, and what everybody does next."""

    def __init__(self, ranks: int, domain: FailureDomain = FailureDomain.SEAT) -> None:
        self.roster = Roster()
        self.generation = -1
        self._in_force = -1
        self.started = False
        self.ended: End | None = None
        self.checkpoint = ""
        self.left: set[WorkerId] = set()
        self.lost: set[WorkerId] = set()
        self.dead: set[WorkerId] = set()  # of the lost ones, those known to be
        self.late: set[WorkerId] = set()  # came when they could take part no more
        self.watch = Watch()
        self._topology: Topology | None = None
        self._domain = domain
        self._enrolment = Enrolment(ranks)
        self._reports: dict[WorkerId, Report] = {}
        self._awaiting: Generation | None = None
        self._outnumbered_at: float | None = None  # by the watch's clock: since then too few are left to go on
        self._finishing = False
        self._stranded = ""  # why those who are left can't go on, at a planned end
        self._leaving: dict[WorkerId, str] = {}
        self._complaints = Complaints()
        self._steps = Steps()
        self._meetings = Meetings()
        self._escalation = Escalation()
        self._code = 0

    # --- messages in -----------------------------------------------------------------------------

    def receive(self, message: object, now: float) -> Output:
        """Handle one message that arrived at ``now`` (seconds)."""
        out = Output()
        if isinstance(message, OF_MEMBERS) and (message.worker in self.lost or message.worker in self.late):
            return out  # it may have been stopped, or cut off, or never have taken part
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
                out.tell(message.worker, self.watch.beat(message))
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

    def greet(self, worker: WorkerId, host: str) -> Output:
        """A process on ``host`` has connected as ``worker``; if it can't take part, it hears so before it does anything."""
        out = Output()
        if self.ended is None and (self.started or worker.incarnation):
            self._turn_away(worker, host, out)
        return out

    def fail(self, text: str) -> Output:
        """Nobody can go on, for a reason that is no worker's."""
        out = Output()
        self._end(text, out)
        return out

    def connection_lost(self, worker: WorkerId, now: float) -> Output:
        """The worker's connection broke without a goodbye: it is gone, or cut off, which is the same to its peers."""
        out = Output()
        self._lose(worker, "its connection broke", now, now, out)
        return out

    def tick(self, now: float) -> Output:
        """Time passes; to be told every ``core.watch.TICK_S``."""
        out = Output()
        for worker, why in self.watch.tick(now).items() if not (self.ended and self.ended.failed) else ():
            self._give_up(worker, why, now, out)
        since = self._outnumbered_at
        if since is not None and self.watch.clock - since > self.watch.progress_s and not self._stranded:
            (self._strand if self._through else self._end)(self._cut_off(), out)
        return out

    def regroup_overdue(self, seconds: float) -> Output:
        """The deadline of a regrouping has passed."""
        out = Output()
        if self._awaiting is not None:
            missing = sorted(member.seat for member in self._awaiting.roster.without(self.left | self._reports.keys()))
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
    def unreachable(self) -> set[WorkerId]:
        """Lost workers of which nobody knows whether they are dead."""
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
        if self.started or self._enrolment.is_stranger(ready.worker):
            self._turn_away(ready.worker, ready.member.host, out)
            return
        if not self._enrolment.add(ready) or self.ended is not None:
            return
        contradiction = self._enrolment.contradiction()
        if contradiction is not None:
            self._end(contradiction, out)
            return
        self._begin(ready.job, ready.stepped, now, out)

    def _turn_away(self, worker: WorkerId, host: str, out: Output) -> None:
        """Nobody can join a job that has started: whoever asks hears so at once, and ends, instead of waiting for the others."""
        if worker in self.late:
            return
        self.late.add(worker)
        why = f"the job has started, and is at step {self.committed + 1}" if self.started else f"another process has rank {worker.rank} already"
        out.say("late", f"a process on {host} wants to take part as rank {worker.rank}: {why}; nobody can join yet, and it is told to end",
                rank=worker.rank, host=host, incarnation=worker.incarnation)
        out.tell(worker, End(0, f"{why}; nobody can join as rank {worker.rank} yet", failed=True))

    def _begin(self, job: Job, stepped: int, now: float, out: Output) -> None:
        self._topology = shape = job.shape
        self.roster = self._enrolment.roster
        self.started = True
        self._escalation = Escalation(job.max_slowdown)
        self.watch = Watch(job.progress_timeout_s, job.idle_timeout_s, job.heartbeat_timeout_s, self.watch.clock)
        self.watch.admit(self.roster.workers)
        verdicts = Verdicts(shape.stages, job.clipping, job.nonfinite == "skip", self.roster.shards)
        self._steps = Steps(stepped, verdicts, job.rebalance, self.roster.shards)
        seats = {str(seat): self.roster.holder(seat).rank for seat in self.roster.seats}
        out.say("start", f"{shape.replicas} replicas of {shape.stages} stages, {shape.micro_batches} micro-batches each; run folder {job.run_dir}",
                job=asdict(job), seats=seats, hosts=sorted({member.host for member in self.roster}))
        for text, details, refused in weak_points(job, self.roster, shape):
            self._end(text, out) if refused else out.say("warning", text, **details)
        if self.ended is None:
            self._regroup("start", now, out)

    # --- regrouping ------------------------------------------------------------------------------

    def _regroup(self, cause: str, now: float, out: Output, from_step: int = 0) -> None:
        """Publish the membership; with ``from_step`` the leaving workers stay members until then."""
        self.generation += 1
        gone = self._leaving if from_step else ()
        slowness = tuple(sorted(self._steps.paces.percent.items()))
        self._awaiting = Generation(self.generation, self.roster.without(gone).members, from_step, cause, now, slowness)
        self._reports.clear()
        if not from_step:
            self._meetings.regrouped()
        out.tell(WORKERS, self._awaiting)

    def _report(self, report: Report, now: float, out: Output) -> None:
        if report.generation != self.generation or self.generation == self._in_force:
            return
        self._reports[report.worker] = report
        if self._stranded:
            self._end(self._stranded, out)
        elif self._awaiting is not None:  # or else too few are left, until a death is known
            self._complete(self._awaiting, now, out)

    def _complete(self, generation: Generation, now: float, out: Output) -> None:
        """Go on if everybody has reported who still can: whoever has gone since has nothing to do with what is left."""
        if not self._reports or (generation.roster.workers & self.roster.workers) - self._reports.keys():
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
        reports = self._reports_by_seat(generation.roster)
        held = {seat: held_by_all([report.held for report in told]) for seat, told in reports.items()}
        drawn = {seat: drawn_by_all([report.drawn for report in told]) for seat, told in reports.items()}
        committed, norm, void = self._steps.agree(generation.number, counts, held, [report.era for report in self._reports.values()])
        ahead = max(counts) - committed
        self._awaiting = None
        self._in_force = generation.number
        self._meetings.regrouped()  # after a planned change too
        if committed > self.committed:
            self._commit(committed, now, out)
        self.roster = self.roster.without({member.worker for member in generation.roster.leaves(self.roster)})
        self._steps.resume(self.roster.workers, committed)
        out.tell(WORKERS, Resume(generation.number, committed, held, norm, void, drawn))
        slowest = max(self._reports.values(), key=lambda report: sum(report.timings.values()))
        throughput = self._escalation.throughput(slowest.period_us)
        out.say("resume", f"{len(self.roster)} workers go on with step {committed + 1}" + "; some have applied it" * bool(ahead),
                generation=generation.number, committed=committed, ahead=ahead, regroup_s=round(now - generation.at, 4),
                digest=slowest.digest, timings=slowest.timings, throughput=throughput)
        self._escalate(throughput, out)
        if self._leaving.keys() & self.roster.workers:
            self._plan_leave(now, out)
        self._compare_replicas(now, out)

    def _reports_by_seat(self, roster: Roster) -> dict[str, list[Report]]:
        """Of those who have reported, shard by shard."""
        told = {str(seat): [self._reports[member.worker] for member in roster.group(seat) if member.worker in self._reports] for seat in roster.seats}
        return {seat: reports for seat, reports in told.items() if reports}

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
        if stepped.worker not in self.roster.workers or self._halted or self.ended and self.ended.failed:
            return
        for step in self._steps.apply(stepped, self.roster.workers):
            self._commit(step, now, out)
        self._compare_replicas(now, out)
        self._rebalance(now, out)

    def _commit(self, step: int, now: float, out: Output) -> None:
        self._complaints.committed()
        self.watch.committed(now)
        self._steps.commit(step, len(self.roster), now, out)

    def _compare_replicas(self, now: float, out: Output) -> None:
        """Whoever differs from a majority is lost as if it had died; what it has contributed since it was right is in everybody's
        state alike, and stays.  Without a majority nobody knows which state to go on with."""
        for mismatch in self._steps.mismatches(self.roster):
            if not mismatch.majority:
                self._end(f"{mismatch}. {self._safe_point()}", out)
                return
            for worker in mismatch.workers:
                self._give_up(worker, str(mismatch), now, out)

    def _rebalance(self, now: float, out: Output) -> None:
        """Plan anew, for a step that nobody has started, where a worker has become slow, or is so no longer."""
        paces = self._steps.paces
        paces.committed(self.committed, self.roster)
        if self._halted or self._awaiting is not None or self.ended is not None:
            return
        for seat, percent in (news := paces.news()).items():
            out.say("rebalance", f"seat {seat} needs {percent}% of the time that its stage's others need: work is dealt out anew", seat=str(seat), percent=percent)
        if news:
            self._regroup(f"pace of {', '.join(map(str, news))}", now, out, from_step=unstarted(self.committed))

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
            out.tell(WORKERS, Met(message.place, values, unstarted(self.committed)))
        if self._stranded:
            self._end(self._stranded, out)

    def _together(self, message: Arrived) -> dict | None:
        """What all have brought along, if with this one all are there, and enough are."""
        if message.generation != self._in_force or self.regrouping is not None:
            return None
        return self._meetings.arrive(message, self.roster.workers, self._outnumbered_at is None)

    def _load(self, message: Loaded, now: float, out: Output) -> None:
        if self._together(Arrived(message.rank, message.generation, "the state of a checkpoint", {}, incarnation=message.incarnation)) is not None:
            self._regroup("a checkpoint was loaded", now, out)

    def _resize(self, message: Resized, now: float, out: Output) -> None:
        """The first who says it says it for all, since all have met before: also where one of them dies now."""
        if message.micro_batches != self._topology.micro_batches:
            self._topology = replace(self._topology, micro_batches=message.micro_batches)
            self._escalation.resize(message.full_us)
            out.say("batch", f"from step {self.committed + 1} on {message.batch} samples a step, {message.micro_batches} micro-batches of each replica",
                    step=self.committed + 1, batch=message.batch, micro_batches=message.micro_batches)
        if self._together(Arrived(message.rank, message.generation, "another batch size", {}, incarnation=message.incarnation)) is not None:
            self._regroup("another batch size", now, out)

    # --- leaving and dying ------------------------------------------------------------------------

    def view(self, roster: Roster) -> ClusterView:
        assert self._topology is not None
        return ClusterView(self._topology, frozenset(roster.seats))

    def _leave(self, message: Leaving, now: float, out: Output) -> None:
        member = self.roster.member(message.worker)
        if member is None or member.worker in self._leaving or self.ended is not None:
            return
        self._leaving[member.worker] = message.reason
        out.say("leaving", f"seat {member.seat} leaves at the next commit: {message.reason}", seat=str(member.seat))
        if not self._halted:
            self._plan_leave(now, out)

    def _plan_leave(self, now: float, out: Output) -> None:
        """Announce a generation for a step that nobody can have started.

        Not in place of an earlier one whose step may have come: who leaves by that may be gone, and no other membership in force is without it.
        """
        if self._awaiting is not None and self.committed >= self._awaiting.from_step - 1:
            return  # once all have come to it, this is called again
        stay = self.roster.without(self._leaving)
        empty = self.view(stay).empty_stages()
        if empty:
            self._end_planned(f"stage {empty[0]} would have no worker left", out)
            return
        leavers = ", ".join(str(member.seat) for member in stay.leaves(self.roster))
        self._regroup(f"planned leave of {leavers}", now, out, from_step=unstarted(self.committed))

    def _goodbye(self, message: Left, now: float, out: Output) -> None:
        worker, self._code = message.worker, max(self._code, message.code)
        self.left.add(worker)
        early = worker in self._leaving and not self._through
        planned = early or self.ended is not None
        member = self.roster.member(worker)
        self._remove(worker)
        self._finishing |= member is not None and not early
        if self.started and not (self.ended and self.ended.failed):
            out.say("left", f"worker {worker.rank} has left after step {self.committed}" + " as planned" * planned, rank=worker.rank)
        self._await_without(member, early, now, out)
        self._finish_if_empty(out)

    def _remove(self, worker: WorkerId) -> None:
        """It is gone, whether it was a member still or not."""
        self.roster = self.roster.without({worker})
        self._leaving.pop(worker, None)
        self._steps.forget(worker)
        self.watch.dismiss(worker)

    def _await_without(self, member: Member | None, early: bool, now: float, out: Output) -> None:
        """``member`` has gone before it could hear of the membership that the others may be reporting for."""
        if self._awaiting is None or member is None or member.worker not in self._awaiting.roster.workers:
            return
        if not len(self.roster):
            self._awaiting = None
        elif not early:  # all steps are committed, and its report is not needed
            self._complete(self._awaiting, now, out)
        elif empty := self.view(self.roster).empty_stages():
            self._end(f"stage {empty[0]} has no live worker left. {self._safe_point()}", out)
        else:
            self._regroup(f"planned leave of {member.seat}", now, out)

    def _exit(self, message: Exited, now: float, out: Output) -> None:
        how = f"was killed by signal {-message.code}" if message.code < 0 else f"exited with code {message.code}"
        self.dead.add(message.worker)
        if message.worker in self.lost:
            out.say("confirmed", f"rank {message.rank} {how}, says its supervisor", rank=message.rank, code=message.code)
            if self._outnumbered_at is not None and not (self.ended and self.ended.failed):
                self._go_on_without(f"death of rank {message.rank}", now, out)
        self._lose(message.worker, how, now, message.at, out)

    def _send_again(self, missing: Missing, now: float, out: Output) -> None:
        """A line between two live workers has lost something: all meet again, over new lines, and it is sent once more.

        Where that does not help, the two can't work together, and the one that is not heard goes; the job ends where nobody knows which.
        """
        if missing.generation != self._in_force or self._halted:
            return
        complaint = self._complaints.add(missing, self.roster)
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

    def _give_up(self, worker: WorkerId, why: str, now: float, out: Output) -> None:
        """Lose a worker that may be alive, and see to it that it does nothing more."""
        self._fence(worker, why, out)
        self._lose(worker, why, now, now, out)

    @staticmethod
    def _fence(worker: WorkerId, why: str, out: Output) -> None:
        for whom in (SUPERVISORS, worker):
            out.tell(whom, Fence(worker.rank, why, incarnation=worker.incarnation))

    def _lose(self, worker: WorkerId, how: str, now: float, at: float, out: Output) -> None:
        if worker in self.lost | self.left | self.late or self.ended and self.ended.failed:
            return
        member = self.roster.member(worker)
        if self.started and member is None:
            self._depart(worker, out)
            return
        if not self.started:
            self.lost.add(worker)
            self._end(f"worker {worker.rank} {how} before training started", out)
            return
        first, *others = self._domain.of(member, self.roster)
        self._lose_member(first, how, at, out)
        for other in others:
            why = f"it is given up with seat {member.seat} (rank {worker.rank}), which is lost"
            self._fence(other.worker, why, out)
            self._lose_member(other, why, at, out)
        self._after_loss(member, now, out)

    def _lose_member(self, member: Member, how: str, at: float, out: Output) -> None:
        self.lost.add(member.worker)
        self._remove(member.worker)
        out.say("lost", f"seat {member.seat} (rank {member.rank}) lost: {how}. {self._left_over(member.seat)}",
                seat=str(member.seat), rank=member.rank, how=how, seen_at=at)

    def _after_loss(self, member: Member, now: float, out: Output) -> None:
        """... and of whoever was given up with it."""
        empty = self.view(self.roster).empty_stages()
        why = f"stage {empty[0]} has no live worker left. {self._safe_point()}" if empty else ""
        if self._finishing:  # all steps are committed, and the training script is through
            self._await_without(member, False, now, out)
        elif empty and self._through:
            self._strand(why, out)
        elif empty:
            self._end(why, out)
        else:
            self._go_on_without(f"loss of {member.seat}", now, out)
        self._finish_if_empty(out)

    def _strand(self, why: str, out: Output) -> None:
        """All steps up to a planned end are committed, and those left can't go on.  Who does nothing with the others any more goes, and that is no failure; who
        still meets them, to save the last state, would wait in vain."""
        if self.generation > self._in_force and self._reports or self._meetings.waiting:
            self._end(why, out)
        else:
            self._stranded = why

    def _depart(self, worker: WorkerId, out: Output) -> None:
        """Its planned leave holds, and it is gone without the goodbye: nobody needs anything of it any more."""
        self.left.add(worker)
        self._remove(worker)
        out.say("left", f"worker {worker.rank} has left after step {self.committed} as planned, without a word", rank=worker.rank)
        self._finish_if_empty(out)

    def _go_on_without(self, cause: str, now: float, out: Output) -> None:
        """... if those left are enough, which the news of a death that is known can make them."""
        if len(self.unreachable) <= len(self.roster):
            self._outnumbered_at = None
            self._regroup(cause, now, out)
        elif self._outnumbered_at is None:
            self._outnumbered_at, self._awaiting = self.watch.clock, None

    def _cut_off(self) -> str:
        return (f"{len(self.unreachable)} workers can't be reached and aren't known to be dead, and only {len(self.roster)} are left here: "
                f"this may be the smaller side of a broken network. {self._safe_point()}")

    def _left_over(self, seat: Seat) -> str:
        live = self.view(self.roster).live_replicas(seat.stage)
        count = {0: "no live worker", 1: "one live worker"}.get(len(live), f"{len(live)} live workers")
        return f"Stage {seat.stage} has {count} left"

    def _safe_point(self) -> str:
        return f"Last checkpoint: {self.checkpoint}" if self.checkpoint else "No checkpoint was saved"

    # --- ending ----------------------------------------------------------------------------------

    def _end_planned(self, reason: str, out: Output, code: int = 0) -> None:
        if not self.started:
            self._end(reason, out)
        elif self.ended is None:
            self.ended = End(unstarted(self.committed), reason, failed=False, code=code)
            out.tell(WORKERS, self.ended)

    def _end(self, reason: str, out: Output) -> None:
        if self.ended is None or not self.ended.failed:
            self.ended = End(0, reason, failed=True)
            self._awaiting = None
            out.say("end", f"the job ends: {reason}")
            out.tell(WORKERS, self.ended)
            out.tell(SUPERVISORS, Over(1))

    def _finish_if_empty(self, out: Output) -> None:
        if not len(self.roster) and self.started and not (self.ended and self.ended.failed):
            if (verdicts := self._steps.verdicts).judged:
                out.say("validated", f"{verdicts.rejected} of {verdicts.judged} steps were rejected and applied again", rejected=verdicts.rejected, judged=verdicts.judged)
            out.say("finished", f"all workers have left after step {self.committed}", step=self.committed)
            out.tell(SUPERVISORS, Over(self._code))

    def _note(self, note: Note, out: Output) -> None:
        if note.kind == "checkpoint":
            self.checkpoint = note.details["path"]
        out.events.append(Event(note.kind, note.text, {"rank": note.rank, **note.details}))
