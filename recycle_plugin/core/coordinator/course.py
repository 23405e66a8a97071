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
(core/coordinator/barriers.py), where plain iterators stand (core/coordinator/places.py), what logs have
(core/coordinator/logs.py), who takes the seat of a lost one (core/coordinator/vacancies.py), how far those are who come
back (core/coordinator/joining.py).  What the latter lead to is in core/coordinator/returns.py, how a stage that has
nobody comes back in core/coordinator/replays.py, and which way a loss goes, with what that costs, in
core/coordinator/recovery_ways.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from recycle_plugin.core.coordinator import goodbyes, offline, recovery_ways, replays, returns
from recycle_plugin.core.coordinator.attendance import Attendance
from recycle_plugin.core.coordinator.barriers import Barriers
from recycle_plugin.core.coordinator.ending import Ending
from recycle_plugin.core.coordinator.failure_detector import Suspicion
from recycle_plugin.core.coordinator.joining import Joining, Phase
from recycle_plugin.core.coordinator.log_places import LogPlaces
from recycle_plugin.core.coordinator.logs import Logs
from recycle_plugin.core.coordinator.output import WORKERS, CoordinatorOutput
from recycle_plugin.core.coordinator.places import Places, ended_iterators
from recycle_plugin.core.coordinator.recovery_times import RecoveryTimes
from recycle_plugin.core.coordinator.regrouping import Regrouping, Reports
from recycle_plugin.core.coordinator.replica_check import Mismatch
from recycle_plugin.core.coordinator.slow_replicas import SlowReplicas
from recycle_plugin.core.coordinator.step_ledger import StepLedger
from recycle_plugin.core.coordinator.step_validation import StepValidation
from recycle_plugin.core.coordinator.suspicions import Suspicions
from recycle_plugin.core.coordinator.throughput_floor import ThroughputFloor
from recycle_plugin.core.coordinator.vacancies import OVER, Vacancies
from recycle_plugin.core.coordinator.wait_graph import records, shown, wait_graph
from recycle_plugin.core.messages.activity import WAITS
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, Resume
from recycle_plugin.core.messages.from_workers import (
    BarrierReached,
    CheckpointLoaded,
    Exited,
    Heartbeat,
    Leaving,
    Left,
    OutOfData,
    Resized,
    Stepped,
    SurvivorReport,
    Unguarded,
)
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.dataflow import unpack
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.core.vocabulary.evaluation_route import ended_at
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.iterator_draws import ends_before
from recycle_plugin.core.vocabulary.log_boundaries import at_start, stage_hosts
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId
from recycle_plugin.core.vocabulary.step_batches import StepBatches

UNEVEN_S = 3.0  # for so long who is through with its own part of a step may wait for scripts that end in it too
EARLY = (
    ", and nothing is lost yet: start the job again; where nobody has killed it, "
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
        self.recovery_times = RecoveryTimes()
        self.batches = StepBatches.full(0)  # whose micro-batches each step has, once the job is known
        self.drops: dict[int, offline.Drops] = {}  # by replica, of those that were slow once
        self.unsaid: dict[int, list[Member]] = {}  # by stage, who is lost, and it was not said yet which way that goes
        self._barriers = Barriers()
        self._throughput_floor = ThroughputFloor()
        self._suspicions = Suspicions()
        self._resized_in = -1  # the generation in which somebody has planned for another batch size last
        self._lacked: dict[WorkerId, int] = {}  # how often each had nothing to draw, since the last commit
        self._stood_still = -1  # behind which commit all have regrouped since everybody waited

    @property
    def roster(self) -> Roster:
        """The members."""
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
        slow_replicas = SlowReplicas(job.unit == "replica" and job.slow is not None)
        self.steps = StepLedger(stepped, validation, job.rebalance, roster.shards, slow_replicas)
        self._throughput_floor = ThroughputFloor(job.max_slowdown)
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
            self._throughput_floor.resize(message.full_us)
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

    def regroup(self, cause: str, now: float, out: CoordinatorOutput, from_step: int = 0) -> None:
        """Publishes the membership as a new generation; with ``from_step`` the leaving workers stay members until
        then, and those who come back join.
        """
        slowness = tuple(sorted(self.steps.straggler_detector.percent.items()))
        if from_step:
            roster = self.joining.planned(self.attendance.staying)
            self.joining.announced(self.regrouping.generation + 1, roster, from_step)
        else:
            roster = self.attendance.roster = self.joining.called_off(self.roster)
        self.regrouping.publish(roster, from_step, cause, now, slowness, out)

    def report(self, message: SurvivorReport, now: float, out: CoordinatorOutput) -> None:
        """Takes in a survivor's report, and goes on once everybody has reported who still can."""
        self.attendance.failure_detector.ran(message.worker)
        returns.enter(self, message, out)
        if self.regrouping.add(message):
            self._end_if_stranded(out)
            self._complete(now, out)

    def overdue(self, seconds: float, out: CoordinatorOutput) -> None:
        """Ends the job if ``seconds`` after a regrouping began somebody has not reported, who is not to wait."""
        if self.logs.waits_since is not None or self.ending.finishing:
            return
        why = self.regrouping.overdue(self.attendance.left, seconds)
        if why is not None:
            self.end(why, out)

    def _complete(self, now: float, out: CoordinatorOutput) -> None:
        """Goes on if everybody has reported who still can.  Where the reports contradict each other, those go that
        contradict most of the others, or the job ends.
        """
        reports = self.regrouping.complete(self.roster)
        if reports is None:
            return
        for worker, why in reports.odd.items():
            self.give_up(worker, Cause.CONFUSED, why, now, out)
        if reports.odd:
            return
        contradiction = reports.contradiction()
        if contradiction is not None:
            self.end(contradiction, out)
        else:
            self._go_on(reports, now, out)

    def _go_on(self, reports: Reports, now: float, out: CoordinatorOutput) -> None:
        generation, held = reports.generation, reports.holdings
        if reports.loaded:
            returns.loaded(self, out)
            self.logs.rewind()
            self.steps.rewind(reports.counts[0], out)
            self.attendance.failure_detector.rewind(reports.counts[0])
            self.places.rewind()
        committed, norm, rejected = self.steps.agree(generation.number, reports.counts, held, reports.all_valid_from)
        self.regrouping.agreed(generation)
        before, batches = self.batches, self._batches_behind(committed, reports)
        of_each = {step: (before if step <= committed else batches).of(step) for step in self.steps.unfinished}
        self.places.agree(reports, self.committed, of_each, self.attendance.micro_batches)
        if committed > self.committed:
            self._commit(committed, now, out)
        self.batches = batches
        if batches.replicas != before.replicas:
            self._say_batches(out)
        self.attendance.agreed(generation.roster)
        returns.come_in_force(self, out)
        self.attendance.failure_detector.regrouped()
        self.steps.resume(self.roster, committed)
        self.logs.resume(committed, held, self.roster.workers)
        places = {str(replica): place for replica, place in self.places.known(reports).items()}
        ended, unfilled = ended_iterators(reports), self.places.unfilled(reports, committed)
        if unfilled:
            self._drop(unfilled, out)
        data = (
            reports.held_draws,
            tuple(sorted(reports.placed)),
            places,
            {str(one): ended[one] for one in ended},
            unfilled,
        )
        decided = self.batches if self._shrinks else None
        out.tell(WORKERS, Resume(generation.number, committed, held, norm, rejected, *data, decided))
        if self.batches.void:
            assert self.job is not None, "a job that trains has begun"
            self.steps.without(self.batches, self.job.micro_batches, out)
        share = self.batches.share(committed + 1)
        throughput = self._throughput_floor.throughput(reports.slowest.period_us, share)
        if self.unsaid:
            recovery_ways.say_rerouted(self, now - generation.at, throughput, out)
        self._say_resume(reports, committed, throughput, now, out)
        self._end_if_too_slow(throughput, out)
        returns.compare(self, now, out)
        self.plan_change(now, out)
        self._compare_replicas(now, out)

    @property
    def _pushed(self) -> bool:
        return self.job is not None and self.job.pushed

    @property
    def _shrinks(self) -> bool:
        return self.job is not None and self.job.policy.shrinks

    def _batches_behind(self, committed: int, reports: Reports) -> StepBatches:
        """The decision which replicas the steps behind ``committed`` have, and what becomes of what the lost have
        contributed to those that were begun (core/vocabulary/step_batches.py).
        """
        if not self._shrinks:
            return self.batches
        assert self.job is not None, "a job that trains has begun"
        held = {Seat.parse(seat): unpack(packed) for seat, packed in reports.holdings.items()}
        whole = self.job.policy.replicas(self.attendance.view(reports.generation.roster))
        return self.batches.changed(whole, committed, held, self.job.stages)

    def _say_batches(self, out: CoordinatorOutput) -> None:
        batches, first = self.batches, self.committed + 1
        kept = sorted(map(int, batches.of_steps))
        step = kept[-1] + 1 if kept else first
        share = batches.share(step)
        text = f"from step {step} on {share} contribute"
        if not share.whole:
            text += (
                f": sums are divided by what they contribute, and each step is applied with {share.rate_factor:.3g} of "
                "its learning rate"
            )
        if kept:
            text += f"; step {' and '.join(map(str, kept))} has what was lost too, in all its sums"
        elif batches.void:
            text += f"; what was lost is in no sum of step {batches.void}"
        out.say(
            "contributing",
            text,
            step=step,
            contributed=list(batches.replicas),
            replicas=batches.total,
            rate_factor=round(share.rate_factor, 6),
            kept=kept,
            void=batches.void,
        )

    def _drop(self, step: int, out: CoordinatorOutput) -> None:
        self.steps.leave_out(step)
        out.say(
            "data",
            f"all iterators have ended, and step {step} can't be filled: what they had left for it is dropped, and "
            "every script hears so by a StopIteration",
            step=step,
            unfilled=True,
        )

    def out_of_data(self, message: OutOfData, now: float, out: CoordinatorOutput) -> None:
        """Takes in that a worker has nothing to draw for a step: all meet, and others give more, or the data has
        ended.  More often than all others together could need between two commits it is the worker that goes round in
        circles.
        """
        member = self.roster.member(message.worker)
        if member is None or not self.holds(message.generation) or self.ending.failed:
            return
        self._lacked[member.worker] = self._lacked.get(member.worker, 0) + 1
        if self._lacked[member.worker] > len(self.attendance.seats) + 1:
            why = f"it has no data for step {message.step}, {self._lacked[member.worker]} times, whatever others give"
            self.give_up(member.worker, Cause.CONFUSED, why, now, out)
        else:
            self.regroup(f"{member.seat} has no data for step {message.step}", now, out)

    def _say_resume(
        self, reports: Reports, committed: int, throughput: float, now: float, out: CoordinatorOutput
    ) -> None:
        slowest, ahead = reports.slowest, max(reports.counts) - committed
        out.say(
            "resume",
            f"{len(self.roster)} workers go on with step {committed + 1}" + "; some have applied it" * bool(ahead),
            generation=reports.generation.number,
            committed=committed,
            ahead=ahead,
            regroup_s=round(now - reports.generation.at, 4),
            digest=slowest.digest,
            timings=slowest.timings,
            throughput=throughput,
            period_us=slowest.period_us,
            bound_us=slowest.bound_us,
        )

    def _end_if_too_slow(self, throughput: float, out: CoordinatorOutput) -> None:
        reason = self._throughput_floor.reason(throughput)
        if reason is None or self.ending.ended is not None:
            return
        self.end_planned(reason, out, TRY_AGAIN)
        assert self.ending.ended is not None, "a planned end has its step at once"
        last = self.ending.ended.step - 1
        out.say(
            "throughput_floor",
            f"{reason}: the job ends with a checkpoint of step {last} and exit code {TRY_AGAIN}",
            throughput=throughput,
            step=last,
            code=TRY_AGAIN,
        )

    # --- steps -----------------------------------------------------------------------------------

    def step(self, message: Stepped, now: float, out: CoordinatorOutput) -> None:
        """Takes in that a worker has applied a step; commits what all have applied."""
        member = self.roster.member(message.worker)
        if member is None or self.halted or self.ending.failed:
            return
        if message.step > self.committed:
            self.places.stepped(message, member.seat.replica)
        before = self.committed
        for step in self.steps.apply(message, self.roster.workers):
            self._commit(step, now, out)
        self._compare_replicas(now, out)
        self._rebalance(now, out)
        if self.committed > before:
            offline.drop(self, now, out)
            offline.bring_back(self, now, out)

    def _commit(self, step: int, now: float, out: CoordinatorOutput) -> None:
        self.attendance.failure_detector.committed(step, now)
        self.steps.commit(step, self.roster, now, out, self.batches)
        self.batches = self.batches.committed(step)
        self._lacked.clear()
        self.logs.passed.clear()
        self.vacancies.committed(step)
        self.places.commit(step)
        self.joining.tell(self.steps.recorded, step, self.places.known(), out)

    def _compare_replicas(self, now: float, out: CoordinatorOutput) -> None:
        """Gives up whoever differs from a majority as if it had died; what it has contributed since it was right is in
        everybody's state alike, and stays.  Without a majority nobody knows which state to go on with, and the job
        ends.
        """
        for mismatch in self.steps.mismatches(self.roster):
            self.act_on_mismatch(mismatch, now, out)

    def act_on_mismatch(self, mismatch: Mismatch, now: float, out: CoordinatorOutput) -> None:
        """Gives up who differs, or ends the job where nobody knows who is right."""
        if not mismatch.majority:
            self.end(f"{mismatch}. {self.ending.safe_point}", out)
            return
        for worker in mismatch.workers:
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
        self, message: BarrierReached | CheckpointLoaded | Resized, place: str, values: dict, out: CoordinatorOutput
    ) -> dict | None:
        """Notes that a worker has arrived at the barrier named ``place``; returns what all have brought along, if with
        this one all are there, else None.

        Where scripts push, one that comes back is not awaited before it is given work: its script is at the others'
        step only then.
        """
        self._end_if_stranded(out)
        if message.generation != self.regrouping.in_force or self.regrouping.at_once is not None:
            return None
        awaited = self.roster.at_work if self._pushed else self.roster.workers
        return self._barriers.arrive(
            message.worker, message.generation, place, values, awaited, not self.attendance.outnumbered
        )

    def passed(self, place: str, values: dict, out: CoordinatorOutput) -> None:
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

    def leave(self, wishes: Collection[Leaving], now: float, out: CoordinatorOutput) -> None:
        """Takes in that members want to leave, or are to, and plans for it."""
        if self.ending.ended is not None or self.ending.finishing:
            return
        news = [each.worker for each in self._with_their_units(wishes) if self.attendance.announce(each, out)]
        for worker in news:
            self.vacancies.stay_away(worker.rank, out)
        if news:
            self.plan_change(now, out)

    def _with_their_units(self, wishes: Collection[Leaving]) -> Iterator[Leaving]:
        """The wishes, and for each those that are of the same unit: nobody takes part in it without the others."""
        for wish in wishes:
            member = self.roster.member(wish.worker)
            yield wish
            for other in self.attendance.together(member) if member is not None else ():
                yield Leaving(other.rank, wish.reason, incarnation=other.incarnation)

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
            self.end_planned(why, out, TRY_AGAIN, self.attendance.why_leaving)
            return
        changes = {
            "planned leave of": {member.seat for member in stay.leaves(self.roster)},
            "return of": {each.seat for each in joins if each.phase is not Phase.EQUAL},
            "work for": {each.seat for each in joins if each.phase is Phase.EQUAL},
        }
        cause = "; ".join(f"{what} {', '.join(map(str, sorted(seats)))}" for what, seats in changes.items() if seats)
        self.regroup(cause, now, out, from_step=unstarted(self.committed))

    def goodbye(self, message: Left, now: float, out: CoordinatorOutput) -> None:
        """Takes in that a worker has left: as planned, or since its script is through."""
        worker, member = message.worker, self.roster.member(message.worker)
        self.joining.forget(worker)
        early = message.planned and not self._through
        if early:
            self.vacancies.left(worker)
            self.log_places.ended(worker, self.committed)
        if member is not None and not message.planned and self.ending.ended is None:
            self._script_ended(member, message.step, now, out)
        self.attendance.leave(worker)
        if member is not None and not early:
            self.attendance.through.add(member.seat.stage)
        if early and member is not None:
            self._leave_with(member, out)
        self.ending.goodbye(message.code, member is not None and not early)
        if self.attendance.started and not self.ending.failed:
            planned = early or self.ending.ended is not None
            out.say(
                "left",
                f"{self.attendance.named(worker.rank)} has left after step {self.committed}" + " as planned" * planned,
                rank=worker.rank,
            )
        self._await_without(member, early, now, out)
        self._finish_if_empty(out)

    def _leave_with(self, member: Member, out: CoordinatorOutput) -> None:
        """Counts on nobody any more who is of one unit with ``member``, which has left as planned: they are about to
        do so.  Who was told meanwhile that it is to go on can't, and is ended.
        """
        for other in self.attendance.together(member)[1:]:
            self.attendance.await_goodbye(other.worker)
            if self.regrouping.counts_on(other.worker):
                self.attendance.fence(other.worker, f"{member} has left, and they go as one", out)

    def heartbeat(self, message: Heartbeat, out: CoordinatorOutput) -> None:
        """Takes in a worker's heartbeat, and answers it with a lease."""
        out.tell(message.worker, self.attendance.failure_detector.heartbeat(message))
        member = self.roster.member(message.worker)
        if member is not None and not self._pushed:
            self._compare_scripts(member, message.step, out)

    def _script_ended(self, member: Member, step: int, now: float, out: CoordinatorOutput) -> None:
        """Notes that the script of ``member`` has ended after ``step``: the others' have to do so too, or they would
        wait for it, or go on without its data.  Costs one look at each worker.
        """
        self.ending.scripts_end(member, step)
        if self._pushed:
            self._send_away_without_work(now, out)
            return
        self._compare_scripts(member, step, out)
        for other in self.roster:
            last = self.attendance.failure_detector.last(other.worker)
            if last is not None:
                self._compare_scripts(other, last.step, out)

    def _send_away_without_work(self, now: float, out: CoordinatorOutput) -> None:
        """Ends newcomers that have entered, and would wait for a step that does not come: scripts that push end."""
        for newcomer in self.joining:
            worker = newcomer.member.worker
            if worker in self.roster.workers:
                self.joining.forget(worker)
                self.attendance.leave(worker)
                returns.tell_away(newcomer, OVER, out)
                self._await_without(newcomer.member, False, now, out)

    def _see_uneven(self, out: CoordinatorOutput) -> None:
        """Ends the job where somebody waits in a step that a script which has ended was to contribute to.  Scripts that
        push may all end in the middle of one, and then nobody waits.  Costs one look at each member.
        """
        if not (self._pushed and self.ending.finishing):
            return
        detector = self.attendance.failure_detector
        for member in self.roster:
            at, _, for_s = detector.doing(member.worker)
            last = detector.last(member.worker)
            if last is not None and at == WAITS and for_s > UNEVEN_S:
                self._compare_scripts(member, last.step, out)

    def _compare_scripts(self, member: Member, step: int, out: CoordinatorOutput) -> None:
        begun = step < unstarted(self.committed)  # what nobody can be at is no news of a script
        if begun and not self.ending.failed and (uneven := self.ending.uneven(member, step)):
            self.end(f"{uneven}. {self.ending.safe_point}", out)

    def _await_without(self, member: Member | None, early: bool, now: float, out: CoordinatorOutput) -> None:
        """Goes on without ``member``, which has gone before it could hear of the membership that the others may be
        reporting for.
        """
        if member is None or not self.regrouping.counts_on(member.worker):
            return
        if not len(self.roster):
            self.regrouping.stop()
        elif not early:  # all steps are committed, and its report is not needed
            self._complete(now, out)
        elif empty := self._empty_stage():
            self.end(empty, out, self._crash)
        else:
            self.regroup(f"planned leave of {member.seat}", now, out)

    # --- dying -----------------------------------------------------------------------------------

    def died(self, message: Exited, now: float, out: CoordinatorOutput) -> None:
        """Takes in that a supervisor has seen its worker's process end."""
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
                self._act_on(worker, suspicion, now, out)
        self._see_standstill(now, out)
        self._see_uneven(out)
        returns.call_off_late(self, now, out)
        replays.call_off_late(self, now, out)
        if cut_off := self.attendance.cut_off():
            self._give_up_going_on(f"{cut_off}. {self.ending.safe_point}", out)
        replays.see_gone(self, now, out)
        returns.tick(self, now, out)

    def _act_on(self, worker: WorkerId, suspicion: Suspicion, now: float, out: CoordinatorOutput) -> None:
        member, failure_detector = self.roster.member(worker), self.attendance.failure_detector
        if member is not None and self.roster.is_last(member):
            limit_s = failure_detector.deadlines.last_worker_timeout_s
            if suspicion.for_s > limit_s and not replays.why_not(self, (member.seat.stage,)):
                self.give_up(worker, suspicion.cause, f"{suspicion} (deadline {limit_s:.1f} s)", now, out)
            elif suspicion.for_s > limit_s:
                self.end(
                    f"{member}, the last worker of stage {member.seat.stage}: {suspicion} (deadline {limit_s:.1f} s). "
                    f"{self.ending.safe_point}. {self._say_waits(out)}",
                    out,
                )
        elif suspicion.overdue:
            failure_detector.has_cost(suspicion.work)
            self.give_up(worker, suspicion.cause, f"{suspicion} (deadline {suspicion.limit_s:.1f} s)", now, out)

    def _see_standstill(self, now: float, out: CoordinatorOutput) -> None:
        """Acts where everybody waits.  Once it may be a message that was lost, and then all say again what they hold;
        twice it is a mistake that nobody here can mend.
        """
        failure_detector = self.attendance.failure_detector
        standstill_s = failure_detector.standstill_s
        if self.halted or self.ending.failed or standstill_s <= failure_detector.stall_s:
            return
        why, waits = f"everybody waits for {standstill_s:.1f} s", self._say_waits(out)
        if self._stood_still == self.committed:
            self.end(
                f"{why}, once more since step {self.committed} was committed. {self.ending.safe_point}. {waits}", out
            )
        else:
            self._stood_still = self.committed
            out.say("warning", f"{why}, and nobody does anything: all meet again. {waits}")
            self.regroup("everybody waits", now, out)

    def _say_waits(self, out: CoordinatorOutput) -> str:
        """Says who waits for whom, as text and as data; returns the text."""
        edges = wait_graph(self.roster, self.attendance.failure_detector)
        out.say("wait_graph", shown(edges), edges=records(edges))
        return f"Who waits for whom: {shown(edges)}"

    def give_up(self, worker: WorkerId, cause: Cause, why: str, now: float, out: CoordinatorOutput) -> None:
        """Fences a worker that may be alive, and takes it for lost, unless it has gone with another one meanwhile."""
        if self.attendance.is_gone(worker):
            return
        self.attendance.fence(worker, why, out)
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
            self.end(
                f"{crash or f'{self.attendance.named(worker.rank)}: {how}'} before training started{EARLY * killed}",
                out,
                killed=worker.rank if killed else None,
            )
        elif (newcomer := self.joining.get(worker)) is not None and member is None:
            returns.lose(self, newcomer, cause, how, now, out)
        elif member is None:
            self._depart(worker, out)
        else:
            for each in self.attendance.lose(member, cause, how, at, out):
                self.joining.forget(each.worker)
                if not (each.joining or self.ending.finishing):
                    self.unsaid.setdefault(each.seat.stage, []).append(each)
            if cause is Cause.SILENT:
                self.vacancies.silent(member.rank)
            self._after_loss(member, now, out)

    def _depart(self, worker: WorkerId, out: CoordinatorOutput) -> None:
        """Removes a worker whose planned leave holds, and that is gone without the goodbye: nobody needs anything of it
        any more.
        """
        self.attendance.leave(worker)
        self.vacancies.left(worker)
        self.log_places.ended(worker, self.committed)
        out.say(
            "left",
            f"{self.attendance.named(worker.rank)} has left after step {self.committed} as planned, without a word",
            rank=worker.rank,
        )
        self._finish_if_empty(out)

    def _after_loss(self, member: Member, now: float, out: CoordinatorOutput) -> None:
        """Goes on after the loss of ``member`` and of whoever was given up with it, or ends."""
        self.logs.lost(member)
        self.log_places.ended(member.worker, self.committed)
        if self.ending.finishing and self.attendance.crash([member.worker]):
            self.attendance.through.add(member.seat.stage)  # with that error the job ends
        if self.ending.finishing:
            self._await_without(member, False, now, out)
            if self._is_missed(member):
                self.go_on_without_stage(now, out)
        elif self._empty_stage():
            self.go_on_without_stage(now, out)
        else:
            self.go_on_without(f"loss of {member.seat}", now, out)
        self._finish_if_empty(out)

    def _is_missed(self, member: Member) -> bool:
        """Whether nobody else is left, or was, to do for a stage what scripts do behind the last step."""
        return self.ending.ended is None and member.seat.stage in self.attendance.empty_stages()

    def let_go(self, out: CoordinatorOutput) -> None:
        """Lets those go whose scripts are through, where nobody needs them."""
        goodbyes.let_go(self, out)

    def go_on_without_stage(self, now: float, out: CoordinatorOutput) -> None:
        """Waits until the stages that have nobody are replayed, or ends where they can't be."""
        if not replays.after_loss(self, now, out):
            self._give_up_going_on(self._empty_stage(), out, self._crash)

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

    @property
    def _through(self) -> bool:
        """Whether all steps up to a planned end are committed."""
        return self.ending.through(self.committed)

    def end_planned(self, reason: str, out: CoordinatorOutput, code: int = 0, cause: str = "") -> None:
        """Ends the job after a step that all come to.  ``cause``: what has led to that.

        Where guards were killed, that is taken for it, and the script does not know: there is to be a checkpoint.
        """
        guards = ", ".join(
            f"the guard of rank {worker.rank}, process {pid}, was killed"
            for worker, pid in sorted(self.attendance.unguarded.items())
        )
        if guards:
            reason, code = f"{reason}, after {guards}", TRY_AGAIN
        if self.attendance.started:
            self.ending.plan(self.committed, reason, code, out, cause)
        else:
            self.end(reason, out)

    def end(self, reason: str, out: CoordinatorOutput, cause: str = "", killed: int | None = None) -> None:
        """Ends the job at once: nobody can go on.  ``killed``: a rank whose worker was killed before there was a run
        folder to say so in.
        """
        self.regrouping.stop()
        self.ending.fail(reason, out, cause, killed)
        self.vacancies.close(out)

    def _empty_stage(self) -> str:
        """The reason why those left can't go on, if a stage has nobody; else empty."""
        empty = self.attendance.empty_stages()
        undone = f", and what its script does after step {self.committed}, the last one, is not done"
        what = undone * self.ending.finishing
        return f"stage {empty[0]} has no live worker left{what}. {self.ending.safe_point}" if empty else ""

    @property
    def _crash(self) -> str:
        """The errors with which the scripts of those have ended who are missing in a stage that is empty."""
        empty = self.attendance.empty_stages()
        return self.attendance.crash_in(empty[0]) if empty else ""

    def end_without_stage(self, why: str, out: CoordinatorOutput, cause: str = "") -> None:
        """Ends the job as failed, for a stage that nobody is left in: at once, or where scripts are through already,
        once they all are.
        """
        if not self.ending.finishing:
            self.end(why, out, cause)
            return
        self.logs.waits_since = None
        self.ending.undone = self.ending.undone or why
        self._finish_if_empty(out)

    def _give_up_going_on(self, why: str, out: CoordinatorOutput, cause: str = "") -> None:
        """Ends the job, unless all steps up to a planned end are committed.  Then this is no failure: who does nothing
        with the others any more just goes.

        But who still waits for them would wait in vain.
        """
        if not self._through:
            self.end_without_stage(why, out, cause)
        elif not self.ending.stranded:
            self.ending.stranded = why
            wanted = self.regrouping.wanted or self._barriers.waiting(self.regrouping.in_force)
            self.regrouping.stop()
            if wanted:
                self._end_if_stranded(out)

    def _end_if_stranded(self, out: CoordinatorOutput) -> None:
        if self.ending.stranded:
            self.end(self.ending.stranded, out)

    def _finish_if_empty(self, out: CoordinatorOutput) -> None:
        awaited = self.logs.waits_since is not None
        if not len(self.roster) and self.attendance.started and not (self.ending.failed or awaited):
            self.steps.sum_up(out)
            if self.ending.undone:
                self.end(self.ending.undone, out)
                return
            returns.send_away(self, OVER, out)
            self.ending.finish(self.committed, self.attendance.crash_after(self.committed), out)
            self.vacancies.close(out)
