"""Checkers of a simulated job: what must hold, whatever goes wrong; code of its own, that shares nothing with what it
checks.

Safety, while the job runs: every sum that becomes a gradient holds each micro-batch exactly once, or where batches
shrink each of some replicas', the same in all stages, those that were always whole among them; no weight gradient is
counted twice by its worker; what the stages of a tie add up is one sum each, the same on all its replicas; every member
logs the boundaries that are counted on; a committed step stays committed, and at its commit all live replicas of a
stage hold the weights that the fault-free run has with the same data (samples.py), also where its sums depend
on their order; and they have applied one gradient in each stage, clipped by one norm in all, which is told once.  Where
sums depend on their order and nothing keeps it, there is no fault-free run to compare with, and replicas are compared
with each other.  No worker keeps more than its budget.  All are told the same losses of an evaluation, those of the
committed weights; a checkpoint that has its name is whole, and nobody goes on before it has.  Nobody healthy is given
up, and who comes back does so with all that come as one with it.  Where a worker is confused (confusion.py)
it costs itself alone, and nobody else is taken for that.

Progress, at the end: all troubles being over, every live worker has trained every step up to the planned end, with the
fault-free losses, and of each stage somebody's script has come to its end, unless the job has ended for a reason that
allows it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

from recycle_plugin.core.coordinator.facts.output import WORKERS
from recycle_plugin.core.messages.contributions import LOSS
from recycle_plugin.core.messages.from_coordinator import BarrierPassed, Collected, End, Generation, Resume
from recycle_plugin.core.messages.from_workers import Leaving, Unreplayable
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.iterator_draws import ends_before
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.lab.simulator.arithmetic import Batch, Sample, sampled
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.given_up import KNOWN_US
from recycle_plugin.lab.simulator.ledger import Ledger
from recycle_plugin.lab.simulator.reference import Reference
from recycle_plugin.lab.simulator.samples import Samples
from recycle_plugin.lab.simulator.scenario import Scenario

CALM_STEPS, CALM_US = 15, 10_000_000  # in which who comes back is let in, where nothing else happens


class Watcher:
    """The checker of one scenario.  ``simulator.cluster`` tells it what happens; ``violations`` says in words what was
    wrong.
    """

    def __init__(self, given: Scenario, weights: tuple[int, ...], late: bool) -> None:
        """Checks the scenario ``given``, from ``weights`` on.  ``late``: tensors may be lost or come late, since a line
        is broken or a worker is held up.
        """
        self.shape, self.steps, self.budget, self.late, self.rounds = (
            given.shape,
            given.steps,
            given.budget,
            late,
            given.rounds,
        )
        self.reference = Reference(given.shape, weights, given.clip, given.policy.block, given.shards, given.by_hand)
        self._samples = Samples(given.shape, given.epoch, given.lengths, self.say) if given.iterators else None
        self._ledger = Ledger(self.say, given.policy.shrinks) if given.pushes else None
        self._shrinks = given.policy.shrinks
        self._shards, self._by_replica = given.shards, given.unit == "replica"
        self._members: Collection[WorkerId] = ()  # of the last generation that was published
        self._contributed: dict[tuple[int, int], frozenset[int]] = {}  # by stage and step, the replicas in the last sum
        self._once_gone: set[int] = set()  # replicas
        if not (given.iterators or given.pushes or self._shrinks):
            for step in range(1, given.steps + 1):
                self.reference.follow(step)
        self.violations: list[str] = []
        self._ended_before = 0  # the step before which all data has ended just now
        self._counted: dict[tuple[Seat, int], Counter] = defaultdict(Counter)  # by what workers hold
        self._changes: dict[tuple[int, int], dict[int, str | None]] = {}  # by shard and step, then by rank
        self._told: dict[tuple[int, str], Mapping] = {}
        self._told_with: dict[int, dict] = {}  # when losses were told, the batches that they are of
        self._applied: dict[tuple[tuple[Seat, int], int], tuple[int, float | None]] = {}  # by that, and step
        # steps after which all do something together
        self._pauses = {step for step, what in given.between if what != "pause"}
        self._evaluated: dict[int, Mapping[str, int]] = {}
        self._moments: dict[tuple[int, int, int], tuple[int, ...]] = {}  # by stage and shard, before a committed step
        self._published: set[int] = set()
        self._costly: set[tuple[int, str]] = set()  # work for which somebody was given up
        self._why_unsaved: dict[int, str] = {}  # by step: why there is no checkpoint of it
        self._committed = 0
        self._logs, self._damages = given.logs, given.log_damaged_share > 0
        self._end_asked = False  # by a worker, for all
        self._end: int | None = None  # the step before which the job is to end

    def say(self, text: str) -> None:
        """Notes a violation, once."""
        if text not in self.violations:
            self.violations.append(text)

    # --- while it runs ------------------------------------------------------------------------------

    def computed(self, worker: Any, instruction: Instruction, boundary_only: bool) -> None:
        """Takes in that a worker has run ``instruction``; counts the weight gradients that it makes."""
        if instruction.op not in (Op.W, Op.B):
            return
        key = instruction.step, instruction.micro_batch
        self._counted[worker.held][key] += 1
        if self._counted[worker.held][key] > 1:
            self.say(f"seat {worker.seat} counts {instruction} twice")

    def counts_on(self, worker: Any) -> None:
        """Takes in that a worker that has come back counts on where the others were as it was let in."""
        view = worker.control_view
        if view.let_in_at is None:
            return
        worker.cluster.exercised[ProtocolRule.COUNTED_ON] += 1
        for rank, step in view.said().items():
            if step != view.let_in_at:
                self.say(f"seat {worker.seat} was let in at step {view.let_in_at}, and counts on rank {rank} at {step}")

    def loaded(self, worker: Any, instruction: Instruction, batch: Batch) -> None:
        """Takes in that a worker at an end of the pipeline has loaded a batch of an iterator's."""
        assert self._samples is not None, "nothing is read from iterators"
        self._samples.loaded(instruction.step, instruction.works_on, worker.seat.stage, batch)

    def drew(self, worker: Any, sample: Sample) -> None:
        """Takes in that a script with its own loop has drawn ``sample``."""
        assert self._ledger is not None, "scripts draw nothing"
        self._ledger.drew(worker, sample)

    def ran(self, worker: Any, instruction: Instruction, sample: Sample) -> None:
        """Takes in that a script with its own loop has run ``sample`` in the place of ``instruction``, an F."""
        assert self._ledger is not None, "scripts run nothing"
        self._ledger.ran(worker, instruction.step, instruction.works_on, sample)

    def told_boundary(self, worker: Any, told: bool, applied: bool) -> None:
        """Takes in whether a script was told that a micro-batch is the last one of its step, and whether that has then
        been ``applied``, with no change of the membership between.
        """
        if told != applied:
            self.say(f"seat {worker.seat} was told of a{' boundary that is none' if told else ' boundary too late'}")

    def adopted(self, worker: Any, step: int, change: str | None) -> None:
        """Takes in what a worker applies that scripts have made of the sum of ``step``: the same on all that have the
        same part of it, but for those that were lost with what they alone had applied.
        """
        applied, gone = self._changes.setdefault((worker.held[1], step), {}), worker.cluster.gone()
        for rank, other in applied.items():
            if other != change and rank not in gone:
                self.say(
                    f"step {step} is applied as {other or 'it was'} by rank {rank} and, by seat {worker.seat}, "
                    f"{change or 'as it was'}"
                )
        applied[worker.control_view.worker.rank] = change

    def voided(self, worker: Any, after: int) -> None:
        """Takes in that a worker has dropped what it has counted of the steps after ``after``, computed with rejected
        weights.
        """
        counted = self._counted[worker.held]
        self._counted[worker.held] = Counter({key: count for key, count in counted.items() if key[0] <= after})

    def replaced(self, worker: Any) -> None:
        """Takes in that another process comes in the place of a worker's, and has counted nothing."""
        self._counted.pop(worker.held, None)

    def arrived(self, worker: Any, datum: Datum) -> None:
        """Takes in that a peer's ``datum`` has come, which a mover must not take for one that nobody can have yet."""
        if not worker.control_view.may_come(datum.step):
            self.say(f"seat {worker.seat} would refuse {datum}, which a peer has sent")

    def sent(self, worker: Any) -> None:
        """Takes in that a worker has sent a boundary tensor, so that others may have to go."""
        store = worker.store
        if self.budget is not None and store.weight > self.budget and store.spare:
            self.say(
                f"seat {worker.seat} keeps {store.weight} boundary tensors with a budget of {self.budget}, and "
                f"{store.spare[0]} could go"
            )

    def summed(self, worker: Any, step: int, parts: Mapping[int, Mapping[MicroBatch, Any]]) -> None:
        """Takes in what each worker of a stage, by rank, has brought to the gradient's sum: each micro-batch exactly
        once.
        """
        found = Counter(micro_batch for part in parts.values() for micro_batch in part)
        if self._ledger is not None:
            brought = ((worker.cluster.workers[rank], part) for rank, part in parts.items())
            self._ledger.summed(step, worker.held.shard, brought)
        replicas = frozenset(one.replica for one in found) if self._shrinks else frozenset(range(self.shape.replicas))
        self._contributed[worker.seat.stage, step] = replicas
        batch = [one for one in self.shape.batch if one.replica in replicas]
        wrong = [str(one) for one in batch if found[one] != 1]
        if wrong or sum(found.values()) != len(batch) or not batch:
            self.say(f"the gradient of stage {worker.seat.stage}, step {step}, holds {self._how_often(found, wrong)}")

    def tied(self, worker: Any, step: int, brought: list[tuple[int, int]]) -> None:
        """Takes in what each worker has brought to the sum over a tie (``brought``): its stage and its stage's sum."""
        sums = set(brought)
        if sorted(stage for stage, _ in sums) != list(self.shape.tie(worker.seat.stage)):
            self.say(
                f"the tied gradient of seat {worker.seat}, step {step}, is made of stages "
                f"{sorted(stage for stage, _ in sums)}"
            )

    def heard(self, rank: int, message: object) -> None:
        """Takes in that the coordinator hears ``message`` from ``rank`` or its supervisor; what follows from that is
        what is checked.
        """
        self._end_asked |= isinstance(message, Leaving) and message.all

    def came_upon(self, cluster: Any, message: Unreplayable) -> None:
        """Checks that the coordinator could not know that logs lack what a replay has come upon, which costs time:
        something is damaged, a host has just taken it along, or the disk of who replays is full too.
        """
        what, _, _ = message.why.partition(" is in no log")
        decided = [at for at, event in cluster.events if event.kind == "recovery"]
        if message.lacks is None or self._damages or "can't be logged" in message.why:
            return
        if decided[-1] < cluster.taken.get(what, -KNOWN_US) + KNOWN_US:
            return
        self.say(f"a replay has come upon what was to be known of stage {message.lacks}: {message.why}")

    def told(self, whom: object, message: object) -> None:
        """Takes in a message of the coordinator's.  To all workers: of each step one norm, and one loss, unless they
        are discarded; and no failure once all steps up to a planned end are committed, and nothing is left to do
        together.
        """
        if isinstance(message, Resume) and self._samples is not None:
            self._samples.resumed(message)
        if isinstance(message, Resume) and message.rejected:
            self._told = {key: told for key, told in self._told.items() if key[0] <= message.committed + 1}
        if isinstance(message, Resume) and message.batches is not None and (void := message.batches.void):
            self._told = {key: told for key, told in self._told.items() if key[0] < void}
            self._moments = {key: moments for key, moments in self._moments.items() if key[2] <= void}
        if isinstance(message, Resume) and message.unfilled:
            self._told = {key: told for key, told in self._told.items() if key[0] < message.unfilled}
        elif isinstance(message, BarrierPassed) and self._samples is not None and (step := ends_before(message.place)):
            self._ended_before = step
        elif isinstance(message, Generation):
            self._whole(message)
        elif isinstance(message, Collected):
            key = message.step, message.name
            if whom == WORKERS and key in self._told:
                self.say(f"the {message.name} of step {message.step} is told twice")
            if self._told.setdefault(key, message.values) != message.values:
                self.say(f"{whom} is told another {message.name} of step {message.step} than the others")
            if self._samples is not None and message.name == LOSS:
                self._told_with[message.step] = self._samples.loaded_so_far(message.step)
        elif isinstance(message, End) and whom == WORKERS and not message.failed:
            self._end = message.step
        elif (
            isinstance(message, End)
            and whom == WORKERS
            and self._end is not None
            and self._committed >= self._end - 1
            and self._end - 1 not in self._pauses
        ):
            self.say(f"the job has failed at its planned end, with all steps committed: {message.reason}")

    def _whole(self, generation: Generation) -> None:
        """Checks that whoever comes back in ``generation`` does so with all that come as one with it."""
        there = Counter(member.seat for member in generation.members)
        new = [member for member in generation.members if member.incarnation and member.worker not in self._members]
        self._members = generation.roster.workers
        for seat in sorted({member.seat for member in new}):
            unit = [Seat(seat.replica, stage) for stage in range(self.shape.stages)] if self._by_replica else [seat]
            if any(there[each] < self._shards for each in unit):
                self.say(f"generation {generation.number} has a part of seat {seat}, which comes back whole")

    def fenced(self, cluster: Any, rank: int, why: str) -> None:
        """Takes in that the worker of ``rank`` is fenced, on suspicion, or for what it has done.

        Who only has work that takes long is healthy: it may cost one worker where that can't be told from one that
        hangs, and no second one; and without a stage's last worker there is no job, unless the stage can be replayed.
        """
        worker, suspected = (
            cluster.workers[rank],
            why.startswith(("it computes", "its process is stopped", "nothing was heard")),
        )
        roster = cluster.membership.roster  # nobody is in that of a job that is over
        if suspected and roster and not roster.stage(worker.seat.stage) and not self._logs:
            self.say(f"seat {worker.seat}, the last of its stage, is given up on suspicion: {why}")
        if why.startswith("it computes") and not worker.stuck and not worker.stopped:
            heavy = [
                each for each in cluster.scenario.heavy if f"{each.stage}{each.op}{each.micro_batch}@{each.step}" in why
            ]
            work = {(each.step, each.micro_batch) for each in heavy}
            if not heavy or any(each.computes for each in heavy) or work & self._costly:
                self.say(f"seat {worker.seat} is given up, and healthy: {why}")
            self._costly |= work

    def applied(self, worker: Any, step: int, gradient: int, norm: float | None) -> None:
        """Takes in the gradient that a worker applies in ``step``, clipped by ``norm``.  What was taken back and is
        applied again is told again.
        """
        self._applied[worker.held, step] = gradient, norm
        if self._ledger is not None:
            self._ledger.applied(worker, step)

    def replayed(self, worker: Any, step: int, weight: int) -> None:
        """Takes in that a worker that replays its stage has come to ``weight`` by ``step``, which is committed: it has
        what its stage had, moments too, unless sums depend on their order and nothing keeps that.
        """
        if self.rounds:
            return
        stage, moments = worker.seat.stage, tuple(worker.numbers.moments.values())
        if weight != self.reference.weights[step + 1][stage]:
            self.say(f"seat {worker.seat} has replayed step {step} to wrong weights")
        if self._moments.get((stage, 0, step + 1), moments) != moments:
            self.say(f"seat {worker.seat} has replayed step {step} to other moments than its stage had")

    @staticmethod
    def _how_often(found: Counter, wrong: list[str]) -> str:
        return ", ".join(f"micro-batch {name} {found[MicroBatch.parse(name)]} times" for name in wrong) or "strangers"

    def missed(self, worker: Any, datum: Datum, source: Seat) -> None:
        """Takes in that a worker says that it waits in vain for ``datum``, which it may only where data can be lost or
        late.
        """
        if not self.late:
            self.say(f"seat {worker.seat} waits in vain for {datum} from seat {source}, and no line is broken")

    def committed(self, cluster: Any) -> None:
        """Compares weights and gradients of the live workers where the coordinator has committed a step.  Costs time in
        proportion to the workers.
        """
        now = cluster.membership.committed
        if self._logs:
            self._logs_what_counts(cluster)
        if self._ended_before and self._samples is not None:
            gone = {cluster.workers[rank].seat.replica for rank in cluster.gone()}
            sources = set(range(self.shape.replicas)) - gone - cluster.homeless
            self._samples.ended(self._ended_before, sources, len(self._of_step(self._ended_before)))
            self._ended_before = 0
        if now < self._committed:
            self.say(f"step {self._committed} was committed, and now only {now} is")
        gone = {cluster.workers[rank].seat.replica for rank in cluster.gone()}
        self._once_gone |= gone
        if now > self._committed:
            for step in range(self._committed + 1, now + 1) if self._shrinks else ():
                self._contributed_alike(step)
            if self._samples is not None:
                batches = {step: self._of_step(step) for step in range(self._committed + 1, now + 1)}
                self._samples.committed(batches, set(range(self.shape.replicas)) - gone, cluster.homeless)
            if self._ledger is not None:
                self._ledger.committed(cluster, self._committed + 1, now)
            self._follow(self._committed + 1, now)
            roster, joining = cluster.membership.roster, cluster.membership.state.joining
            entered = (member for member in roster if joining.get(member.worker) is None)  # others may be a step behind
            live = [cluster.workers[member.rank] for member in entered]
            for step in range(self._committed + 1, now + 1):
                self._alike([worker.held for worker in live], step)
            self._committed = now
            for worker in live:
                self._right_weights(worker, now)

    def _of_step(self, step: int) -> frozenset[int]:
        """The replicas whose micro-batches ``step`` has, as far as it was added up."""
        everybody = frozenset(range(self.shape.replicas))
        return self._contributed.get((0, step), everybody) if self._shrinks else everybody

    def _contributed_alike(self, step: int) -> None:
        """Checks that the same replicas are in the sums of all stages, those that were always whole among them."""
        by_stage = {self._contributed.get((stage, step), frozenset()) for stage in range(self.shape.stages)}
        if len(by_stage) > 1:
            names = " and ".join(str(sorted(replicas)) for replicas in sorted(by_stage, key=sorted))
            self.say(f"step {step} has other replicas in one stage's sum than in another's: {names}")
        if missing := set(range(self.shape.replicas)) - self._once_gone - frozenset.union(*by_stage):
            self.say(f"step {step} is without what replica {min(missing)} has, of which nobody was lost")

    def _logs_what_counts(self, cluster: Any) -> None:
        """Checks that every member logs all boundaries at least that the coordinator counts as logged."""
        counted = cluster.membership.state.logs.boundaries
        for member in cluster.membership.roster:
            worker = cluster.workers[member.rank]
            if worker.alive and (lacking := counted - worker.log.boundaries):
                self.say(f"seat {worker.seat} does not log boundary {min(lacking)}, which is counted on")

    def _alike(self, live: list[tuple[Seat, int]], step: int) -> None:
        """Checks that all have applied ``step`` alike.  Weights follow from that, where they were equal before."""
        for held in live:
            if (held, step) not in self._applied:
                self.say(f"step {step} is committed, and seat {held[0]} has not applied it")
                return
        if len(norms := self._several(self._applied[held, step][1] for held in live)) > 1:
            self.say(f"step {step} is clipped by {' and '.join(map(str, norms))}")
        for stage in range(self.shape.stages):
            if len(self._several(self._applied[held, step][0] for held in live if held[0].stage == stage)) > 1:
                self.say(f"the replicas of stage {stage} have applied different gradients in step {step}")

    @staticmethod
    def _several(values: Iterable[Hashable]) -> list:
        return sorted(set(values), key=str)

    def _right_weights(self, worker: Any, committed: int) -> None:
        for step in (committed + 1, committed + 2):  # after the last committed step, or one ahead of it
            held = worker.store.get(of_layers("params", worker.seat, step))
            if held is not None and step <= self.steps + 1:
                if step - 1 > self._committed:
                    self._follow(step - 1, step - 1)
                changed_for, moments = worker.numbers.unchanged
                moments = moments if changed_for == step else tuple(worker.numbers.moments.values())
                if self._moments.setdefault((worker.seat.stage, worker.held.shard, step), moments) != moments:
                    self.say(f"seat {worker.seat} has other moments behind step {step - 1} than its stage's others")
                if not self.rounds and held != self.reference.weights[step][worker.seat.stage]:
                    self.say(f"seat {worker.seat} has wrong weights behind step {step - 1}")
                return
        self.say(f"seat {worker.seat} has no weights behind step {committed}, which is committed")

    def _follow(self, first: int, last: int) -> None:
        """Trains the reference with the data that was computed with, where that depends on who is lost."""
        drawn = self._ledger or self._samples
        if drawn is None and not self._shrinks:
            return
        for step in range(first, last + 1):
            data = None if drawn is None else drawn.of(step)
            self.reference.follow(step, data, self._of_step(step))

    # --- between steps ------------------------------------------------------------------------------

    def evaluated(self, worker: Any, number: int, count: int, step: int, losses: Mapping[str, int]) -> None:
        """Takes in the losses that a worker has of evaluation ``number``, after ``step``, of ``count`` micro-batches
        from each replica.
        """
        if self._evaluated.setdefault(number, losses) != losses:
            self.say(f"seat {worker.seat} was told other losses of evaluation {number} than another")
        found = {MicroBatch.parse(name): loss for name, loss in losses.items()}
        gone = worker.cluster.lost_seats
        for replica in range(self.shape.replicas):
            batch = {MicroBatch(replica, index) for index in range(count)}
            if not batch <= found.keys() and not {Seat(replica, 0), Seat(replica, self.shape.stages - 1)} <= gone:
                self.say(f"evaluation {number} is without data of replica {replica}, an end of which lives")
        for micro_batch, loss in found.items():
            if not self.rounds and loss != self.reference.loss(step + 1, sampled(micro_batch, -number)):
                self.say(f"the loss of micro-batch {micro_batch} in evaluation {number} is wrong")

    def published(self, worker: Any, step: int, written: Mapping[tuple[Seat, int], int | None]) -> None:
        """Takes in that a checkpoint of ``step`` has its name.  ``written``: the weight that each worker has written,
        by what it holds, None where it could not.
        """
        self._published.add(step)
        self._check_nobody_writes(worker, step, written)
        for stage in range(self.shape.stages):
            weights = {weight for (seat, _), weight in written.items() if seat.stage == stage}
            if len(weights) != 1 or (not self.rounds and weights != {self.reference.weights[step + 1][stage]}):
                self.say(
                    f"the checkpoint of step {step} has {'no' if not weights else 'wrong'} weights of stage {stage}"
                )

    def discarded(self, worker: Any, step: int, written: Mapping[tuple[Seat, int], int | None]) -> None:
        """Takes in that what there is of a checkpoint of ``step`` is removed.  ``written``: as for
        :meth:`published`.
        """
        self._check_nobody_writes(worker, step, written)

    def _check_nobody_writes(self, worker: Any, step: int, written: Mapping[tuple[Seat, int], int | None]) -> None:
        live = {(member.seat, member.shard) for member in worker.control_view.roster}
        if live - written.keys():
            self.say(f"seat {worker.seat} takes a checkpoint of step {step} for written, which others still write")

    def saved(self, worker: Any, step: int, why: str) -> None:
        """Takes in that a worker goes on behind a checkpoint of ``step``.  ``why``: the reason that there is none, or
        "".
        """
        if not why and step not in self._published:
            self.say(f"seat {worker.seat} goes on behind a checkpoint of step {step} that is not there")
        if self._why_unsaved.setdefault(step, why) != why:
            self.say(f"seat {worker.seat} was told otherwise than another whether there is a checkpoint of step {step}")

    @property
    def saved_steps(self) -> set[int]:
        """The steps of checkpoints behind which somebody has gone on."""
        return {step for step, why in self._why_unsaved.items() if not why}

    # --- at the end ---------------------------------------------------------------------------------

    def finished(self, cluster: Any, may_end: bool) -> None:
        """Checks progress at the end of the job.  ``may_end``: the troubles leave some stage without a worker, or too
        few workers in touch.
        """
        ended = cluster.membership.ended
        if ended is not None and ended.failed and not may_end:
            self.say(f"the job has ended although it could go on: {ended.reason}")
        if ended is None or not ended.failed:
            self._let_in(cluster)
        self._rightly_given_up(cluster)
        self._confused_alone(cluster)
        if not cluster.scenario.logs_apart and any(event.kind == "log_gone" for _, event in cluster.events):
            self.say("logs are taken to be gone that are in a folder which others see too")
        if ended is None:
            through = {each.seat.stage for each in (*cluster.workers.values(), *cluster.returned) if each.through}
            for stage in sorted(set(range(self.shape.stages)) - through):
                self.say(f"no script of stage {stage} has come to its end, and the job has not failed")
        if ended is None and self._end_asked:
            self.say("a worker has asked for everybody's end, and the job has gone on")
        at_the_end = (None,) if ended is None or ended.failed else (None, ended.reason)
        last = self.steps if ended is None or ended.failed else min(self.steps, ended.step - 1)
        told: dict[int, dict] = {}
        for worker in cluster.workers.values():
            if (
                worker.alive
                and worker.runs
                and not worker.stuck
                and not (worker.stopped and ended is not None and ended.failed)
            ):
                self.say(
                    f"seat {worker.seat} waits for {worker.waits_for}"
                    if worker.waiting
                    else f"seat {worker.seat} has not ended"
                )
            # what went down with a worker of a step that all had applied is missing, and said so
            for step, losses in worker.losses.items():
                expected = told.setdefault(step, losses) if self.rounds else self._losses(step)
                losses, expected = self._of_what_stayed(step, losses), self._of_what_stayed(step, expected)
                if self._shrinks and not worker.alive:  # the step may be void for the others
                    losses = {name: loss for name, loss in losses.items() if name in expected}
                if not losses.items() <= expected.items() or (losses != expected and not cluster.membership.lost):
                    self.say(f"seat {worker.seat} was told wrong losses of step {step}")
            if (
                worker.alive
                and worker.control_view.worker not in cluster.membership.lost
                and worker.reason in at_the_end
                and not worker.runs
                and not worker.control_view.outside
            ):
                self._right_weights(worker, last)
        if (ended is None or not ended.failed) and self._committed < last:
            self.say(f"only {self._committed} of {last} steps are committed")

    def _rightly_given_up(self, cluster: Any) -> None:
        """Checks that where nothing is wrong but that somebody hears nobody, that one alone is given up; where it can't
        tell, perhaps one of its peers before.  Work that takes long may cost somebody too.
        """
        if cluster.scenario.heavy:
            return
        deaf = {cluster.workers[rank].seat for rank in cluster.deafened}
        lost = {
            worker.seat for worker in cluster.workers.values() if worker.control_view.worker in cluster.membership.lost
        }
        if cluster.scenario.unit == "replica":  # who is lost with another one is no loss of its own
            lost = {
                min(seat for seat in lost if seat.replica == replica) for replica in {seat.replica for seat in lost}
            }
            lost -= {seat for seat in lost if seat.replica in {each.replica for each in deaf}}
        lost -= {cluster.workers[rank].seat for rank in cluster.confusion.ranks}
        lost -= {seat for each in cluster.scenario.troubles if each.kind in ("kill", "vanish") for seat in each.seats}
        healthy = list(map(str, sorted(lost - deaf)))
        if cluster.deafened and len(healthy) > (not all(cluster.deafened.values())):
            self.say(f"seats {', '.join(healthy)} were given up, since another hears nobody")

    def _let_in(self, cluster: Any) -> None:
        """Checks that nobody who comes back is kept waiting while nothing happens but steps, one after another."""
        waiting: dict[int, str] = {}
        calm, since = 0, 0
        for at, event in cluster.events:
            if event.kind in ("newcomer", "caught_up", "replayed"):
                waiting[event.details["rank"]] = event.text
            elif event.kind in ("rejoined", "lost", "restart", "not_restarted", "turned_down", "held_back"):
                waiting.pop(event.details["rank"], None)
            calm += event.kind == "committed"
            if event.kind not in ("committed", "loss", "rejected", "resume", "catching_up", "recovery_plan"):
                calm, since = 0, at
            if waiting and calm > CALM_STEPS and at - since > CALM_US:
                self.say(f"{calm} steps pass, and it is not let in: {'; '.join(waiting.values())}")
                return

    def _confused_alone(self, cluster: Any) -> None:
        """Checks that nobody is taken for confused who is not, and that where nothing else is wrong nobody else is
        lost, nor the job ended, but with those that are given up as one.
        """
        confused = cluster.confusion.ranks
        lost = {event.details["rank"]: event.details["cause"] for _, event in cluster.events if event.kind == "lost"}
        for rank, cause in lost.items():
            if cause == Cause.CONFUSED.value and rank not in confused:
                self.say(f"seat {cluster.workers[rank].seat} is taken for confused, and is not")
        for text in [event.text for _, event in cluster.events if event.kind in ("lost", "turned_down")]:
            if "unlike" in text and not confused:
                self.say(f"a state was hashed or followed wrongly: {text}")
        scenario = cluster.scenario
        if scenario.faults or scenario.heavy or any(each.kind != "confused" for each in scenario.troubles):
            return
        for rank, cause in lost.items():
            if rank not in confused and cause != Cause.TOGETHER.value:
                self.say(f"seat {cluster.workers[rank].seat} is lost, and another one was confused")

    def _of_what_stayed(self, step: int, losses: Mapping[str, int]) -> Mapping[str, int]:
        """The losses without micro-batches whose batch was lost with all that was computed with it, after their loss
        was told: another one took its place.
        """
        if self._samples is None:
            return losses
        before, now = self._told_with.get(step, {}), self._samples.loaded_so_far(step)
        return {
            name: loss
            for name, loss in losses.items()
            if before.get(MicroBatch.parse(name)) == now.get(MicroBatch.parse(name))
        }

    def _losses(self, step: int) -> Mapping[str, int]:
        if step > self._committed:  # told, and never committed
            self._follow(step, step)
        return self.reference.losses[step]
