"""Checkers of a simulated job: what must hold whatever goes wrong. They share no code with what they check.

Safety, while the job runs:
* Every sum that becomes a gradient has each micro-batch exactly once. If batches shrink, it has each one of some
  replicas, the same in all stages, and always those that have never lost a worker. No worker counts a weight gradient
  twice. The stages of a tie add up one sum each, the same on all its replicas.
* A committed step stays committed. At its commit all live replicas of a stage hold the weights of the fault-free run
  with the same data (samples.py), also where sums depend on their order. They have applied one gradient per stage,
  clipped by one norm in all, which is told once. If sums depend on their order and nothing keeps that order, there is
  no fault-free run, and replicas are compared with each other.
* Every member logs the boundaries that are counted on. No worker keeps more than its budget.
* All are told the same losses of an evaluation, those of the committed weights. A named checkpoint is whole, and nobody
  goes on before it has its name.
* No healthy worker is given up. A returning worker comes with all of its unit. A confused worker (confusion.py) costs
  itself alone, and nobody else is taken for confused.

Progress, at the end, with all troubles over: every live worker has trained every step up to the planned end, with the
fault-free losses, and a script of each stage has come to its end, unless the job has ended for an allowed reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

from recycle_plugin.core.coordinator.facts.output import LAST_STAGE, WORKERS
from recycle_plugin.core.messages.contributions import LOSS, MEAN
from recycle_plugin.core.messages.from_coordinator import BarrierPassed, Collected, End, Generation, Resume
from recycle_plugin.core.messages.from_workers import Leaving, Unreplayable
from recycle_plugin.core.vocabulary.barrier import Meets
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.losses import mean, number
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.lab.simulator.arithmetic import Batch, Sample, sampled
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.given_up import KNOWN_US
from recycle_plugin.lab.simulator.ledger import Ledger
from recycle_plugin.lab.simulator.reference import Reference
from recycle_plugin.lab.simulator.samples import Samples
from recycle_plugin.lab.simulator.scenario import Scenario

CALM_STEPS, CALM_US = 15, 10_000_000  # in which a newcomer is let in if nothing else happens


class Watcher:
    """The checker of one scenario, which lab/simulator/cluster.py informs. ``violations``: what was wrong, in words."""

    def __init__(self, given: Scenario, weights: tuple[int, ...], late: bool) -> None:
        """Check the scenario ``given`` from ``weights`` on. ``late``: tensors may be lost or late."""
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
        self._members: Collection[WorkerId] = ()  # of the last published generation
        self._contributed: dict[tuple[int, int], frozenset[int]] = {}  # by (stage, step): the replicas in the last sum
        self._once_gone: set[int] = set()  # replicas
        if not (given.iterators or given.pushes or self._shrinks):
            for step in range(1, given.steps + 1):
                self.reference.follow(step)
        self.violations: list[str] = []
        self._ended_before = 0  # the step before which all data has just ended
        self._counted: dict[tuple[Seat, int], Counter] = defaultdict(Counter)  # by what a worker holds
        self._changes: dict[tuple[int, int], dict[int, str | None]] = {}  # by (shard, step), then by rank
        self._told: dict[tuple[int, str], Mapping] = {}
        self._means: dict[int, set[float]] = defaultdict(set)  # by step
        self._told_with: dict[int, dict] = {}  # by step: the batches of its losses when these were told
        self._applied: dict[tuple[tuple[Seat, int], int], tuple[int, float | None]] = {}  # by (holding, step)
        # steps after which all do something together
        self._pauses = {step for step, what in given.between if what != "pause"}
        self._evaluated: dict[int, Mapping[str, int]] = {}
        self._moments: dict[tuple[int, int, int], tuple[int, ...]] = {}  # by (stage, shard, step that begins)
        self._published: set[int] = set()
        self._costly: set[tuple[int, str]] = set()  # work for which a worker was given up
        self._why_unsaved: dict[int, str] = {}  # by step: why there is no checkpoint
        self._committed = 0
        self._logs, self._damages = given.logs, given.log_damaged_share > 0
        self._end_asked = False  # a worker has asked for everybody's end
        self._end: int | None = None  # the step before which the job is to end

    def say(self, text: str) -> None:
        """Record a violation, once."""
        if text not in self.violations:
            self.violations.append(text)

    # --- while it runs ------------------------------------------------------------------------------

    def computed(self, worker: Any, instruction: Instruction, boundary_only: bool) -> None:
        """Count the weight gradients of ``instruction``, which a worker has run."""
        if instruction.op not in (Op.W, Op.B):
            return
        key = instruction.step, instruction.micro_batch
        self._counted[worker.held][key] += 1
        if self._counted[worker.held][key] > 1:
            self.say(f"seat {worker.seat} counts {instruction} twice")

    def counts_on(self, worker: Any) -> None:
        """Check that a returned worker counts on where the others were when it was let in."""
        view = worker.control_view
        if view.let_in_at is None:
            return
        worker.cluster.exercised[ProtocolRule.COUNTED_ON] += 1
        for rank, step in view.said().items():
            if step != view.let_in_at:
                self.say(f"seat {worker.seat} was let in at step {view.let_in_at}, and counts on rank {rank} at {step}")

    def loaded(self, worker: Any, instruction: Instruction, batch: Batch) -> None:
        """Record that a worker at an end of the pipeline has loaded a batch of an iterator."""
        assert self._samples is not None, "nothing is read from iterators"
        self._samples.loaded(instruction.step, instruction.works_on, worker.seat.stage, batch)

    def drew(self, worker: Any, sample: Sample) -> None:
        """Record that a script with its own loop has drawn ``sample``."""
        assert self._ledger is not None, "scripts draw nothing"
        self._ledger.drew(worker, sample)

    def ran(self, worker: Any, instruction: Instruction, sample: Sample) -> None:
        """Record that a script with its own loop has run ``sample`` for ``instruction``, an F."""
        assert self._ledger is not None, "scripts run nothing"
        self._ledger.ran(worker, instruction.step, instruction.works_on, sample)

    def told_boundary(self, worker: Any, told: bool, applied: bool) -> None:
        """Check that a script was ``told`` that a micro-batch ends its step exactly if that was ``applied``."""
        if told != applied:
            self.say(f"seat {worker.seat} was told of a{' boundary that is none' if told else ' boundary too late'}")

    def adopted(self, worker: Any, step: int, change: str | None) -> None:
        """Check that all workers with the same part of a sum apply the same change of it, except for lost ones."""
        applied, gone = self._changes.setdefault((worker.held[1], step), {}), worker.cluster.gone()
        for rank, other in applied.items():
            if other != change and rank not in gone:
                self.say(
                    f"step {step} is applied as {other or 'it was'} by rank {rank} and, by seat {worker.seat}, "
                    f"{change or 'as it was'}"
                )
        applied[worker.control_view.worker.rank] = change

    def voided(self, worker: Any, after: int) -> None:
        """Drop what a worker has counted of steps later than ``after``: it was computed with rejected weights."""
        counted = self._counted[worker.held]
        self._counted[worker.held] = Counter({key: count for key, count in counted.items() if key[0] <= after})

    def replaced(self, worker: Any) -> None:
        """Record that another process, which has counted nothing, replaces a worker's."""
        self._counted.pop(worker.held, None)

    def arrived(self, worker: Any, datum: Datum) -> None:
        """Check that a worker does not refuse a peer's ``datum`` as one that nobody can have yet."""
        if not worker.control_view.may_come(datum.step):
            self.say(f"seat {worker.seat} would refuse {datum}, which a peer has sent")

    def sent(self, worker: Any) -> None:
        """Check, after a worker has sent a boundary tensor, that it keeps to its budget."""
        store = worker.store
        if self.budget is not None and store.weight > self.budget and store.spare:
            self.say(
                f"seat {worker.seat} keeps {store.weight} boundary tensors with a budget of {self.budget}, and "
                f"{store.spare[0]} could go"
            )

    def summed(self, worker: Any, step: int, parts: Mapping[int, Mapping[MicroBatch, Any]]) -> None:
        """Check that the parts of a stage's gradient sum, by rank, have each micro-batch exactly once."""
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
        """Check that the parts of a tie's sum, as (stage, its sum), have one sum for each stage."""
        sums = set(brought)
        if sorted(stage for stage, _ in sums) != list(self.shape.tie(worker.seat.stage)):
            self.say(
                f"the tied gradient of seat {worker.seat}, step {step}, is made of stages "
                f"{sorted(stage for stage, _ in sums)}"
            )

    def heard(self, rank: int, message: object) -> None:
        """Record that the coordinator hears ``message`` from ``rank`` or its supervisor."""
        self._end_asked |= isinstance(message, Leaving) and message.all

    def came_upon(self, cluster: Any, message: Unreplayable) -> None:
        """Check that the coordinator could not know what a replay finds missing in logs, which costs time: data is
        damaged, a host has just gone with it, or the disk of a replaying worker is full.
        """
        what, _, _ = message.why.partition(" is in no log")
        decided = [at for at, event in cluster.events if event.kind == "recovery"]
        if message.lacks is None or self._damages or "can't be logged" in message.why:
            return
        if decided[-1] < cluster.taken.get(what, -KNOWN_US) + KNOWN_US:
            return
        self.say(f"a replay has come upon what was to be known of stage {message.lacks}: {message.why}")

    def told(self, whom: object, message: object) -> None:
        """Check a message of the coordinator. All workers hear one norm and one loss for each step, unless these are
        discarded. They hear of no failure once all steps up to a planned end are committed and nothing is left to do
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
        elif isinstance(message, BarrierPassed) and message.barrier.meets is Meets.DATA_ENDED:
            self._ended_before = message.barrier.number
        elif isinstance(message, Generation):
            self._whole(message)
        elif isinstance(message, Collected):
            key = message.step, message.name
            if whom in (WORKERS, LAST_STAGE) and key in self._told:
                self.say(f"the {message.name} of step {message.step} is told twice")
            if self._told.setdefault(key, message.values) != message.values:
                self.say(f"{whom} is told another {message.name} of step {message.step} than the others")
            if message.name == LOSS:
                self._means[message.step].add(number(message.values[MEAN]))
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
        """Check that returning workers in ``generation`` come back with all of their units."""
        there = Counter(member.seat for member in generation.members)
        new = [member for member in generation.members if member.incarnation and member.worker not in self._members]
        self._members = generation.roster.workers
        for seat in sorted({member.seat for member in new}):
            unit = [Seat(seat.replica, stage) for stage in range(self.shape.stages)] if self._by_replica else [seat]
            if any(there[each] < self._shards for each in unit):
                self.say(f"generation {generation.number} has a part of seat {seat}, which comes back whole")

    def fenced(self, cluster: Any, rank: int, why: str) -> None:
        """Check that a worker fenced on suspicion was not healthy. A worker with long work is healthy. Such work may
        cost one worker if it can't be told from a hang, but not a second one. A stage's last worker is not given up,
        unless its stage can be replayed: without it there is no job.
        """
        worker, suspected = (
            cluster.workers[rank],
            why.startswith(("it computes", "its process is stopped", "nothing was heard")),
        )
        roster = cluster.membership.roster  # empty if the job is over
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
        """Record the gradient that a worker applies in ``step``, perhaps again, clipped by ``norm``."""
        self._applied[worker.held, step] = gradient, norm
        if self._ledger is not None:
            self._ledger.applied(worker, step)

    def replayed(self, worker: Any, step: int, weight: int) -> None:
        """Check that a worker has replayed ``step`` to its stage's ``weight`` and moments, if sums keep an order."""
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
        """Check that a worker reports ``datum`` as missing only if data can be lost or late."""
        if not self.late:
            self.say(f"seat {worker.seat} waits in vain for {datum} from seat {source}, and no line is broken")

    def committed(self, cluster: Any) -> None:
        """Compare weights and gradients of the live workers if the coordinator has committed a step. O(workers)."""
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
            entered = (member for member in roster if joining.get(member.worker) is None)  # newcomers may be behind
            live = [cluster.workers[member.rank] for member in entered]
            for step in range(self._committed + 1, now + 1):
                self._alike([worker.held for worker in live], step)
            self._committed = now
            for worker in live:
                self._right_weights(worker, now)

    def _of_step(self, step: int) -> frozenset[int]:
        """Return the replicas whose micro-batches are in ``step``, as far as it was summed."""
        everybody = frozenset(range(self.shape.replicas))
        return self._contributed.get((0, step), everybody) if self._shrinks else everybody

    def _contributed_alike(self, step: int) -> None:
        """Check that all stages' sums have the same replicas, among them those that never lost a worker."""
        by_stage = {self._contributed.get((stage, step), frozenset()) for stage in range(self.shape.stages)}
        if len(by_stage) > 1:
            names = " and ".join(str(sorted(replicas)) for replicas in sorted(by_stage, key=sorted))
            self.say(f"step {step} has other replicas in one stage's sum than in another's: {names}")
        if missing := set(range(self.shape.replicas)) - self._once_gone - frozenset.union(*by_stage):
            self.say(f"step {step} is without what replica {min(missing)} has, of which nobody was lost")

    def _logs_what_counts(self, cluster: Any) -> None:
        """Check that every member logs at least the boundaries that the coordinator counts on."""
        counted = cluster.membership.state.logs.boundaries
        for member in cluster.membership.roster:
            worker = cluster.workers[member.rank]
            if worker.alive and (lacking := counted - worker.log.boundaries):
                self.say(f"seat {worker.seat} does not log boundary {min(lacking)}, which is counted on")

    def _alike(self, live: list[tuple[Seat, int]], step: int) -> None:
        """Check that all have applied ``step`` alike. If their weights were equal before, they still are."""
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
        for step in (committed + 1, committed + 2):  # after the last committed step, or one ahead
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
        """Train the reference with the data that was computed with, if that depends on losses."""
        drawn = self._ledger or self._samples
        if drawn is None and not self._shrinks:
            return
        for step in range(first, last + 1):
            data = None if drawn is None else drawn.of(step)
            self.reference.follow(step, data, self._of_step(step))

    # --- between steps ------------------------------------------------------------------------------

    def evaluated(self, worker: Any, number: int, count: int, step: int, losses: Mapping[str, int]) -> None:
        """Check a worker's losses of evaluation ``number``, after ``step``, of ``count`` micro-batches per replica."""
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
        """Check a newly named checkpoint. ``written``: each worker's weight, by what it holds; None if it has none."""
        self._published.add(step)
        self._check_nobody_writes(worker, step, written)
        for stage in range(self.shape.stages):
            weights = {weight for (seat, _), weight in written.items() if seat.stage == stage}
            if len(weights) != 1 or (not self.rounds and weights != {self.reference.weights[step + 1][stage]}):
                self.say(
                    f"the checkpoint of step {step} has {'no' if not weights else 'wrong'} weights of stage {stage}"
                )

    def discarded(self, worker: Any, step: int, written: Mapping[tuple[Seat, int], int | None]) -> None:
        """Check that nobody still writes a checkpoint that is removed. ``written``: as in :meth:`published`."""
        self._check_nobody_writes(worker, step, written)

    def _check_nobody_writes(self, worker: Any, step: int, written: Mapping[tuple[Seat, int], int | None]) -> None:
        live = {(member.seat, member.shard) for member in worker.control_view.roster}
        if live - written.keys():
            self.say(f"seat {worker.seat} takes a checkpoint of step {step} for written, which others still write")

    def saved(self, worker: Any, step: int, why: str) -> None:
        """Check that a worker goes on after a checkpoint of ``step`` that exists. ``why``: why there is none, or ""."""
        if not why and step not in self._published:
            self.say(f"seat {worker.seat} goes on behind a checkpoint of step {step} that is not there")
        if self._why_unsaved.setdefault(step, why) != why:
            self.say(f"seat {worker.seat} was told otherwise than another whether there is a checkpoint of step {step}")

    @property
    def saved_steps(self) -> set[int]:
        """The steps of checkpoints after which some worker has gone on."""
        return {step for step, why in self._why_unsaved.items() if not why}

    # --- at the end ---------------------------------------------------------------------------------

    def finished(self, cluster: Any, may_end: bool) -> None:
        """Check progress at the end of the job. ``may_end``: the troubles allow the job to fail."""
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
            for step, loss in worker.means.items():
                if loss not in self._means[step]:
                    self.say(f"seat {worker.seat} has a mean loss of step {step} that nobody was told")
            # losses that went down with a worker, of a step that all had applied, are missing, and reported
            for step, losses in worker.losses.items() if worker.seat.stage == self.shape.stages - 1 else ():
                if not losses or worker.means[step] != mean(losses):
                    self.say(f"seat {worker.seat} was told another mean loss of step {step} than that of its losses")
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
        """Check that a deaf worker alone is given up if nothing else is wrong. If it can't tell that it is deaf, one of
        its peers may be given up before. Not checked if work takes long, which may cost a worker too.
        """
        if cluster.scenario.heavy:
            return
        deaf = {cluster.workers[rank].seat for rank in cluster.deafened}
        lost = {
            worker.seat for worker in cluster.workers.values() if worker.control_view.worker in cluster.membership.lost
        }
        if cluster.scenario.unit == "replica":  # workers lost with another one do not count
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
        """Check that no newcomer is kept waiting while nothing but steps happens, unless it is confused."""
        waiting: dict[int, str] = {}
        calm, since = 0, 0
        for at, event in cluster.events:
            if event.kind in ("newcomer", "caught_up", "replayed"):
                if event.details["rank"] not in cluster.confusion.ranks:
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
        """Check that only the confused are taken for that and, without other trouble, only their units are lost."""
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
        """Return the losses without micro-batches whose batch was lost and replaced after their loss was told."""
        if self._samples is None:
            return losses
        before, now = self._told_with.get(step, {}), self._samples.loaded_so_far(step)
        return {
            name: loss
            for name, loss in losses.items()
            if before.get(MicroBatch.parse(name)) == now.get(MicroBatch.parse(name))
        }

    def _losses(self, step: int) -> Mapping[str, int]:
        if step > self._committed:  # told, but not committed
            self._follow(step, step)
        return self.reference.losses[step]
