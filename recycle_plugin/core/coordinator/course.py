"""The course of a job: in which membership it goes on, which steps it commits, and how it comes to its end.

* A loss makes a generation of those left that holds at once; a planned leave one that holds from a step which nobody
  can have started, and is announced again where a loss comes first.
* What the members of a generation have in common when all have reported is committed, and what is left is finished
  from what is held (core/vocabulary/recovery_plan.py).
* A step is committed when every live worker has applied it.  While the membership is changing at once, or too few are
  left, nothing is.
* Replicas that differ are as good as lost, where a majority knows which.
* Who is suspected for too long is given up, but for a stage's last worker, without whom the job ends: that has a longer
  deadline.
* Where everybody waits and nobody does anything, all regroup, by which what was lost is sent once more; if they
  stand still again before another commit, the job ends.
* Where a stage has nobody left it is replayed from the logs, and all others wait for that.
* The job ends where that can't be, where workers contradict each other, where it has become too slow for the
  user, and where all have left.

The facts, and the rules on them alone, are in parts that know nothing of each other: who takes part
(core/coordinator/attendance.py), what a generation's members say (core/coordinator/regrouping.py), what is known of
steps (core/coordinator/step_ledger.py), how the job ends (core/coordinator/ending.py), who waits at which barrier
(core/coordinator/barriers.py), what they post for each other (core/coordinator/boards.py), where plain iterators stand
(core/coordinator/places.py), what logs have (core/coordinator/logs.py), who takes the seat of a lost one
(core/coordinator/vacancies.py), how far those are who come back (core/coordinator/joining.py).

Here is what holds them together: generations, steps, barriers, plans for a change, deaths.  What follows from these has
a module for each subject: how all go on once they have reported (core/coordinator/resuming.py), which replicas
contribute to a step (core/coordinator/contributing.py), who leaves (core/coordinator/departures.py), who comes back
(core/coordinator/returns.py), who does nothing (core/coordinator/stalls.py), who ends without a word
(core/coordinator/vanishing.py), how the job ends
(core/coordinator/ends.py), how a stage that has nobody comes back (core/coordinator/replays.py), and which way a loss
goes (core/coordinator/recovery_ways.py).
"""

from __future__ import annotations

from typing import Any

from recycle_plugin.core.coordinator import departures, ends, goodbyes, replays, returns, stalls, vanishing
from recycle_plugin.core.coordinator.attendance import Attendance
from recycle_plugin.core.coordinator.barriers import Barriers
from recycle_plugin.core.coordinator.boards import Boards
from recycle_plugin.core.coordinator.ending import Ending
from recycle_plugin.core.coordinator.joining import Joining
from recycle_plugin.core.coordinator.log_places import LogPlaces
from recycle_plugin.core.coordinator.logs import Logs
from recycle_plugin.core.coordinator.newcomer_watch import NewcomerWatch
from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.coordinator.places import Places
from recycle_plugin.core.coordinator.recovery_times import RecoveryTimes
from recycle_plugin.core.coordinator.regrouping import Regrouping
from recycle_plugin.core.coordinator.replica_check import Mismatch
from recycle_plugin.core.coordinator.slow_replicas import SlowReplicas
from recycle_plugin.core.coordinator.step_ledger import StepLedger
from recycle_plugin.core.coordinator.step_validation import StepValidation
from recycle_plugin.core.coordinator.suspicions import Suspicions
from recycle_plugin.core.coordinator.throughput import Throughput
from recycle_plugin.core.coordinator.vacancies import Vacancies
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, Generation
from recycle_plugin.core.messages.from_workers import (
    BarrierReached,
    CheckpointLoaded,
    Exited,
    Heartbeat,
    Resized,
    Stepped,
    Unguarded,
)
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.core.vocabulary.evaluation_route import ended_at
from recycle_plugin.core.vocabulary.iterator_draws import ends_before
from recycle_plugin.core.vocabulary.log_boundaries import at_start, stage_hosts
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId
from recycle_plugin.core.vocabulary.step_batches import StepBatches

EARLY = (
    ": start the job again; where nobody has killed it, "
    "see by dmesg on its host whether that ran out of memory, and give its workers more, or make the model smaller"
)


class Course:
    """The course of a job."""

    def __init__(self) -> None:
        self.attendance = Attendance()
        self.regrouping = Regrouping()
        self.steps = StepLedger()
        self.ending = Ending()
        self.joining = Joining()
        self.places = Places()
        self.job: JobSpec | None = None
        self.logs = Logs()
        self.log_places = LogPlaces()
        self.vacancies = Vacancies()
        self.newcomer_watch = NewcomerWatch()
        self.recovery_times = RecoveryTimes()
        self.batches = StepBatches.full(0)  # whose micro-batches each step has, once the job is known
        self.unsaid: dict[int, list[Member]] = {}  # by stage, who is lost, and it was not said yet which way that goes
        self.barriers = Barriers()
        self.boards = Boards()
        self.throughput = Throughput()
        self.stood_by_elsewhere = False  # whether the coordinator's host may go
        self.stood_still = -1  # behind which commit all have regrouped since everybody waited
        # members whose script has ended without a goodbye (vanishing.py)
        self.vanished: dict[WorkerId, Exited | None] = {}
        self.lacked: dict[WorkerId, int] = {}  # how often each had nothing to draw, since the last commit
        self._suspicions = Suspicions()
        self.put_off: Generation | None = None  # planned for a later step when a step was rejected
        self._resized_in = -1  # the generation in which somebody has planned for another batch size last

    @property
    def roster(self) -> Roster:
        return self.attendance.roster

    def speaker(self, worker: WorkerId) -> Member | None:
        """The member, or the newcomer, that ``worker`` is; None for anybody else."""
        newcomer = self.joining.get(worker)
        return newcomer.member if newcomer is not None else self.roster.member(worker)

    @property
    def committed(self) -> int:
        """The last committed step."""
        return self.steps.committed

    @property
    def halted(self) -> bool:
        """Whether the membership in force has lost somebody, or too few are left."""
        return self.regrouping.at_once is not None or self.attendance.outnumbered

    def holds(self, generation: int) -> bool:
        """Whether ``generation`` is the membership in force, and has lost nobody."""
        return generation == self.regrouping.in_force and not self.halted

    def begin(self, roster: Roster, job: JobSpec, stepped: int) -> None:
        """Starts the job with the members of ``roster``, who are all there, and have the state after ``stepped``
        steps.
        """
        self.attendance.begin(roster, job)
        logged = at_start(job.boundaries, stage_hosts(roster))
        self.job, self.logs = job, Logs(job.log, job.stages, logged)
        self.batches = StepBatches.full(job.replicas)
        validation = StepValidation(job.shape.stages, job.clipping, job.nonfinite == "skip", roster.shards)
        slow_replicas = SlowReplicas(job.unit == "replica")
        self.steps = StepLedger(stepped, validation, job.rebalance, roster.shards, slow_replicas)
        self.throughput = Throughput()
        names = {rank: named(rank, seat) for rank, seat in roster.seats_by_rank().items()}
        hosts = roster.hosts_by_rank()
        units = [tuple(member.rank for member in unit) for unit in job.domain.units(roster)]
        self.vacancies.begin(job.rejoin, names, hosts, units, roster.workers, job.deadlines.heartbeat_timeout_s)
        self.joining = Joining(max(map(len, units)), job.domain)

    def resize(self, message: Resized, out: CoordinatorOutput) -> None:
        """Takes another number of micro-batches.  The first worker who says it says it for all: all have passed a
        barrier before, behind the last commit.  Said again, of that generation or an older one, it is no news.
        """
        if not self.logs.passed or message.generation <= self._resized_in:
            return
        self._resized_in = message.generation
        if self.attendance.resize(message.micro_batches):
            self.throughput.resize(message.full_us)
            self.logs.resized(self.committed + 1)
            out.say(
                "batch",
                f"from step {self.committed + 1} on {message.batch} samples a step, {message.micro_batches} "
                "micro-batches of each replica",
                step=self.committed + 1,
                batch=message.batch,
                micro_batches=message.micro_batches,
            )

    # --- regrouping ------------------------------------------------------------------------------

    def regroup(
        self, cause: str, now: float, out: CoordinatorOutput, from_step: int = 0, keeps_plan: bool = False
    ) -> None:
        """Publishes the membership as a new generation; with ``from_step`` the leaving workers stay members until
        then, and those who come back join.  ``keeps_plan``: nobody is lost, so that what is planned for a later step is
        announced again, for the same one.
        """
        planned, self.put_off = self.regrouping.planned, None
        slowness = tuple(sorted(self.steps.straggler_detector.percent.items()))
        if from_step:
            roster = self.joining.planned(self.attendance.staying)
            self.joining.announced(self.regrouping.generation + 1, roster, from_step)
        elif keeps_plan and planned is not None:
            self.put_off, roster = planned, self.roster
        else:
            returns.leave_out(self)
            roster = self.attendance.roster = self.joining.called_off(self.roster)
        self.regrouping.publish(roster, from_step, cause, now, slowness, out)

    def plan_again(self, committed: int, now: float, out: CoordinatorOutput) -> None:
        """Announces again what was planned before a step was rejected, for the same step, before anybody hears that all
        go on behind step ``committed``: so nobody begins that step without having heard.  Else steps that are rejected
        one after the other would keep everybody out, or in, for good.
        """
        if (planned := self.put_off) is not None and planned.from_step > committed:
            self.regroup(planned.cause, now, out, from_step=planned.from_step)
        self.put_off = None

    @property
    def pushed(self) -> bool:
        """Whether scripts call forwards, backwards and steps themselves."""
        return self.job is not None and self.job.pushed

    @property
    def shrinks(self) -> bool:
        """Whether who is lost takes its part of each step's batch along, and nobody else does its work."""
        return self.job is not None and self.job.policy.shrinks

    # --- steps -----------------------------------------------------------------------------------

    def step(self, message: Stepped, now: float, out: CoordinatorOutput) -> None:
        """Takes in that a worker has applied a step; commits what all have applied."""
        member = self.roster.member(message.worker)
        if member is None or self.halted or self.ending.failed:
            return
        if message.step > self.committed:
            self.places.stepped(message, member.seat.replica)
        for step in self.steps.apply(message, self.roster):
            self.commit(step, now, out)
        self.compare_replicas(now, out)
        if self.steps.rebalances:
            self._rebalance(now, out)

    def commit(self, step: int, now: float, out: CoordinatorOutput) -> None:
        """Commits ``step``: what it has changed stays."""
        self.attendance.failure_detector.committed(step, now)
        self.steps.commit(step, self.roster, now, out, self.batches)
        self.batches = self.batches.committed(step)
        self.lacked.clear()
        self.logs.passed.clear()
        self.vacancies.committed(step)
        self.places.commit(step)
        self.joining.tell(self.steps.recorded, step, self.places.known(), out)

    def compare_replicas(self, now: float, out: CoordinatorOutput) -> None:
        """Gives up whoever differs from a majority as if it had died; what it has contributed since it was right is in
        everybody's state alike, and stays.  Without a majority nobody knows which state to go on with, and the job
        ends.
        """
        for mismatch in self.steps.mismatches(self.roster):
            self.act_on_mismatch(mismatch, now, out)

    def act_on_mismatch(self, mismatch: Mismatch, now: float, out: CoordinatorOutput) -> None:
        """Gives up who differs, or ends the job where nobody knows who is right."""
        if not mismatch.majority:
            ends.end(self, f"{mismatch}. {self.ending.safe_point}", out)
            return
        for worker in mismatch.workers:
            if self.joining.get(worker) is not None:
                returns.turn_down(self, worker, str(mismatch), now, out)
            else:
                self.give_up(worker, Cause.DIFFERS, str(mismatch), now, out)

    def _rebalance(self, now: float, out: CoordinatorOutput) -> None:
        """Plans anew, for a step that nobody has started, where a worker has become slow, or is so no longer."""
        self.steps.measured(self.roster)
        if self.halted or self.regrouping.under_way or self.ending.ended is not None:
            return
        cause = self.steps.rebalance(self.roster, out)
        if cause is not None:
            self.regroup(cause, now, out, from_step=unstarted(self.committed))

    # --- between steps ---------------------------------------------------------------------------

    def barrier(
        self,
        message: BarrierReached | CheckpointLoaded | Resized,
        place: str,
        values: dict[str, Any],
        out: CoordinatorOutput,
    ) -> dict[str, Any] | None:
        """Notes that a worker has arrived at the barrier named ``place``; returns what all have brought along, if with
        this one all are there, else None.
        """
        ends.end_if_stranded(self, out)
        if message.generation != self.regrouping.in_force or self.regrouping.at_once is not None:
            return None
        return self.barriers.arrive(
            message.worker, message.generation, place, values, self.roster.workers, not self.attendance.outnumbered
        )

    def passed(self, place: str, values: dict[str, Any], out: CoordinatorOutput) -> None:
        """Takes in that all have passed the barrier named ``place``, with ``values``."""
        self.logs.passed.append(place)
        evaluation, step = ended_at(place), ends_before(place)
        if evaluation is not None:
            self.steps.recorded.evaluated(evaluation, values)
        if step is not None:
            self.steps.recorded.unfilled(step)
        if evaluation is not None or step is not None:
            self.joining.tell(self.steps.recorded, self.committed, self.places.known(), out)

    # --- leaving ---------------------------------------------------------------------------------

    def plan_change(self, now: float, out: CoordinatorOutput) -> None:
        """Announces a generation without those who leave, and with those who come back, for a step that nobody can
        have started.

        Not in place of an earlier one whose step may have come: who leaves by that may be gone, and no other membership
        in force is without it.  Once all have come to that, this is called again.
        """
        leaves, joins = self.attendance.leaving & self.roster.workers, self.joining.ready()
        if not (leaves or joins) or self.halted or self.ending.finishing or self.regrouping.has_come(self.committed):
            return
        if self.ending.ended is not None and not leaves:
            return
        stay = self.attendance.staying
        empty = self.attendance.view(stay).empty_stages()
        if empty:
            why = f"stage {empty[0]} would have no worker left"
            ends.end_planned(self, why, out, TRY_AGAIN, self.attendance.why_leaving)
            return
        changes = {
            "planned leave of": {member.seat for member in stay.leaves(self.roster)},
            "return of": {each.seat for each in joins},
        }
        if self.regrouping.plans(self.joining.planned(stay)):
            return
        cause = "; ".join(f"{what} {', '.join(map(str, sorted(seats)))}" for what, seats in changes.items() if seats)
        self.regroup(cause, now, out, from_step=unstarted(self.committed))

    def heartbeat(self, message: Heartbeat, out: CoordinatorOutput) -> None:
        """Takes in a worker's heartbeat, and answers it with a lease."""
        message = departures.where_it_can_be(self, message)
        out.tell(message.worker, self.attendance.failure_detector.heartbeat(message))
        if not self.ending.some_through or self.pushed:
            return
        if (member := self.roster.member(message.worker)) is not None:
            departures.compare_scripts(self, member, message.step, out)

    # --- dying -----------------------------------------------------------------------------------

    def died(self, message: Exited, now: float, out: CoordinatorOutput) -> None:
        """Takes in that a supervisor has seen its worker's process end."""
        if message.worker in self.vanished:
            self.vanished[message.worker] = message
            return
        how = self.attendance.died(message, out)
        if message.worker in self.attendance.lost and self.attendance.outnumbered and not self.ending.failed:
            self.go_on_without(f"death of rank {message.rank}", now, out)
        self.lose(message.worker, Cause.DIED, how, now, message.at, out, by_itself=message.code >= 0)
        if message.worker in self.attendance.lost and self.attendance.started:
            self.vacancies.lost(message, how, self.is_ending, now, out)

    def unguarded(self, message: Unguarded, out: CoordinatorOutput) -> None:
        """Notes that the process that the launcher had started for a rank is gone: some launchers end the job for that,
        others go on without it.  Of a process that nobody knows it is no news.
        """
        if not self._is_known(message.worker):
            return
        self.attendance.unguarded[message.worker] = message.pid
        self.vacancies.unguarded(message.worker)
        out.say(
            "unguarded",
            f"the guard of rank {message.rank}, process {message.pid} that the launcher had started, was killed, and "
            "its worker goes with it",
            rank=message.rank,
            pid=message.pid,
        )

    def _is_known(self, worker: WorkerId) -> bool:
        """Whether ``worker`` takes part, is to, or has, as far as there is anything to take part in."""
        if not self.attendance.started:
            return not worker.incarnation
        has = worker in self.roster.workers or worker in self.attendance.lost
        return has or self.vacancies.is_newcomer(worker)

    def tick(self, now: float, out: CoordinatorOutput) -> None:
        """Lets time pass, which may show who is stopped or stuck, that nobody does anything, or that those left are cut
        off.  Costs one look at each worker.
        """
        if self.ending.failed:
            return
        suspicions = self.attendance.failure_detector.tick(now)
        self._suspicions.update(suspicions, self.attendance, out)
        for worker, suspicion in suspicions.items():
            if not self.ending.failed:
                stalls.act_on(self, worker, suspicion, now, out)
        stalls.see_standstill(self, now, out)
        departures.see_uneven(self, out)
        returns.call_off_late(self, now, out)
        replays.call_off_late(self, now, out)
        if cut_off := self.attendance.cut_off():
            ends.give_up_going_on(self, f"{cut_off}. {self.ending.safe_point}", out)
        replays.see_gone(self, now, out)
        returns.tick(self, now, out)

    def give_up(self, worker: WorkerId, cause: Cause, why: str, now: float, out: CoordinatorOutput) -> None:
        """Fences a worker that may be alive, and takes it for lost, unless it has gone with another one meanwhile."""
        if self.attendance.is_gone(worker):
            return
        out.fence(worker, why)
        self.lose(worker, cause, why, now, now, out)

    def lose(
        self,
        worker: WorkerId,
        cause: Cause,
        how: str,
        now: float,
        at: float,
        out: CoordinatorOutput,
        by_itself: bool = False,
    ) -> None:
        """Takes a worker for lost, for the ``cause``.  ``at``: when that was seen, in seconds.  ``by_itself``: its
        process has ended so, and not been killed.
        """
        if self.attendance.is_gone(worker) or self.ending.failed:
            return
        member = self.roster.member(worker)
        if not self.attendance.started:
            self.attendance.lost.add(worker)
            crash = self.attendance.crash([worker])
            killed = not crash and not by_itself
            ends.end(
                self,
                f"{crash or f'{self.attendance.named(worker.rank)}: {how}'} before training started{EARLY * killed}",
                out,
                killed=worker.rank if killed else None,
            )
        elif (newcomer := self.joining.get(worker)) is not None and member is None:
            returns.lose(self, newcomer, cause, how, now, out)
        elif member is None:
            departures.depart(self, worker, out)
        else:
            for each in self.attendance.lose(member, cause, how, at, out):
                self.joining.forget(each.worker)
                if not self.ending.finishing:
                    self.unsaid.setdefault(each.seat.stage, []).append(each)
            if cause is Cause.SILENT:
                self.vacancies.silent(member.rank)
            self.vanished.pop(worker, None)
            vanishing.take_for_lost(self, now, out)
            self._after_loss(member, now, out)
            returns.see_sources(self, now, out)

    def _after_loss(self, member: Member, now: float, out: CoordinatorOutput) -> None:
        """Goes on after the loss of ``member`` and of whoever was given up with it, or ends."""
        self.logs.lost(member)
        self.log_places.ended(member.worker, self.committed)
        if self.ending.finishing and self.attendance.crash([member.worker]):
            self.attendance.through.add(member.seat.stage)  # with that error the job ends
        if self.ending.finishing:
            departures.await_without(self, member, False, now, out)
            if self._is_missed(member):
                self.go_on_without_stage(now, out)
        elif ends.empty_stage(self):
            self.go_on_without_stage(now, out)
        else:
            self.go_on_without(f"loss of {member.seat}", now, out)
        ends.finish_if_empty(self, out)

    def _is_missed(self, member: Member) -> bool:
        """Whether nobody else is left, or was, to do for a stage what scripts do behind the last step."""
        return self.ending.ended is None and member.seat.stage in self.attendance.empty_stages()

    def let_go(self, out: CoordinatorOutput) -> None:
        """Lets those go whose scripts are through, where nobody needs them."""
        goodbyes.let_go(self, out)

    def go_on_without_stage(self, now: float, out: CoordinatorOutput) -> None:
        """Waits until the stages that have nobody are replayed, or ends where they can't be."""
        if not replays.after_loss(self, now, out):
            ends.give_up_going_on(self, ends.empty_stage(self), out, ends.crash(self))

    def go_on_without(self, cause: str, now: float, out: CoordinatorOutput) -> None:
        """Goes on if those left are enough, which the news of a death that is known can make them."""
        if self.attendance.enough():
            self.ending.stranded = ""
            self.regroup(cause, now, out)
        else:
            self.regrouping.stop()

    # --- ending ----------------------------------------------------------------------------------

    @property
    def is_ending(self) -> bool:
        """Whether the job's end is decided, or a script is through, and no stage is to be replayed: nobody else can
        come to take part.
        """
        return self.ending.ended is not None or (self.ending.finishing and self.logs.waits_since is None)
