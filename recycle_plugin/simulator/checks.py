"""What must hold in a simulated job, whatever goes wrong; code of its own, that shares nothing with what it checks.

Safety, while the job runs: every sum that becomes a gradient holds each micro-batch exactly once; no weight gradient is
counted twice by its worker; what the stages of a tie add up is one sum each, the same on all its replicas; a committed step stays committed, and at its commit all live replicas of a stage hold the
weights that the fault-free run has, also where its sums depend on their order; no worker keeps more than its budget.  Progress, at the end: all troubles being over,
every live worker has trained every step, with the fault-free losses, unless the job has ended for a reason that allows it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.instruction import Instruction, Op
from recycle_plugin.core.topology import Topology
from recycle_plugin.simulator.exact import LEARNING_RATE, PRIME, added, clipped, sample, share
from recycle_plugin.simulator.worker import Scenario


class Reference:
    """The fault-free run, worked out directly: weights before each step, and the last stage's losses."""

    def __init__(self, shape: Topology, weights: tuple[int, ...], steps: int, clip: float = 0.0, block: int | None = 1) -> None:
        """``block``: as core.plan.Policy's."""
        self.clip, self.exact, self.block = clip, block != 1, block or shape.micro_batches
        self.weights = {1: weights}
        self.losses: dict[int, dict[str, int]] = {}
        for step in range(1, steps + 1):
            weights, self.losses[step] = self._step(shape, weights, step)
            self.weights[step + 1] = weights

    def _step(self, shape: Topology, weights: tuple[int, ...], step: int) -> tuple[tuple[int, ...], dict[str, int]]:
        gradients: list[list[int]] = [[] for _ in weights]  # of each stage, in the micro-batches' order
        losses = {}
        for micro_batch in shape.batch:
            inputs = [sample(micro_batch, step, 1)]
            for weight in weights:
                inputs.append((weight * inputs[-1] + inputs[-1] ** 2) % PRIME)
            gradient = losses[str(micro_batch)] = (inputs[-1] - sample(micro_batch, step, 2)) % PRIME
            for stage in reversed(range(len(weights))):
                gradients[stage].append(gradient * inputs[stage] % PRIME)
                gradient = gradient * (weights[stage] + 2 * inputs[stage]) % PRIME
        sums = [self._sum(values, shape.micro_batches) for values in gradients]
        counted = [True] * len(sums)
        for first, *others in shape.ties:
            total = added(0, sums[first], self.exact)
            for stage in others:
                total, counted[stage] = added(total, sums[stage], self.exact), False
            for stage in (first, *others):
                sums[stage] = total
        updates = self._clipped(sums, counted)
        return tuple((weight - LEARNING_RATE * update) % PRIME for weight, update in zip(weights, updates)), losses

    def _sum(self, values: list[int], micro_batches: int) -> int:
        """Block by block."""
        total = 0
        for replica in range(0, len(values), micro_batches):
            for begin in range(replica, replica + micro_batches, self.block):
                part = 0
                for value in values[begin : min(begin + self.block, replica + micro_batches)]:
                    part = added(part, value, self.exact)
                total = added(total, part, self.exact)
        return total

    def _clipped(self, gradients: list[int], counted: list[bool]) -> list[int]:
        """As a worker that waits for all stages' shares before it applies anything.  ``counted``: which stages' are in the norm."""
        norm = sum(share(gradient) for gradient, counts in zip(gradients, counted) if counts) ** 0.5
        if not self.clip or norm + 1e-6 <= self.clip:
            return gradients
        return [clipped(gradient, norm) for gradient in gradients]


class Watcher:
    """Told by ``simulator.cluster`` what happens; ``violations`` in words."""

    def __init__(self, given: Scenario, weights: tuple[int, ...], late: bool) -> None:
        """``late``: tensors may be lost or come late, since a line is broken or a worker is held up."""
        self.shape, self.steps, self.budget, self.late = given.shape, given.steps, given.budget, late
        self.reference = Reference(given.shape, weights, given.steps, given.clip, given.policy.block)
        self.violations: list[str] = []
        self._counted: dict[Seat, Counter] = defaultdict(Counter)
        self._committed = 0

    def say(self, text: str) -> None:
        if text not in self.violations:
            self.violations.append(text)

    # --- while it runs ------------------------------------------------------------------------------

    def computed(self, worker: Any, instruction: Instruction, bare: bool) -> None:
        if instruction.op not in (Op.W, Op.B):
            return
        key = instruction.step, instruction.micro_batch
        self._counted[worker.seat][key] += 1
        if self._counted[worker.seat][key] > 1:
            self.say(f"seat {worker.seat} counts {instruction} twice")

    def summed(self, worker: Any, step: int, parts: list[dict[Datum, int]]) -> None:
        found = Counter(datum.micro_batch for part in parts for datum in part)
        wrong = [str(one) for one in self.shape.batch if found[one] != 1]
        if wrong or sum(found.values()) != len(self.shape.batch):
            self.say(f"the gradient of stage {worker.seat.stage}, step {step}, holds {self._how_often(found, wrong)}")

    def tied(self, worker: Any, step: int, brought: list[tuple[int, int]]) -> None:
        """``brought``: of each worker, its stage and its stage's sum."""
        sums = set(brought)
        if sorted(stage for stage, _ in sums) != list(self.shape.tie(worker.seat.stage)):
            self.say(f"the tied gradient of seat {worker.seat}, step {step}, is made of stages {sorted(stage for stage, _ in sums)}")

    @staticmethod
    def _how_often(found: Counter, wrong: list[str]) -> str:
        return ", ".join(f"micro-batch {name} {found[MicroBatch.parse(name)]} times" for name in wrong) or "strangers"

    def missed(self, worker: Any, datum: Datum, source: Seat) -> None:
        if not self.late:
            self.say(f"seat {worker.seat} waits in vain for {datum} from seat {source}, and no line is broken")

    def committed(self, cluster: Any) -> None:
        now = cluster.membership.committed
        if now < self._committed:
            self.say(f"step {self._committed} was committed, and now only {now} is")
        if now > self._committed:
            self._committed = now
            for rank in cluster.membership.members:
                self._right_weights(cluster.workers[rank], now)

    def _right_weights(self, worker: Any, committed: int) -> None:
        for step in (committed + 1, committed + 2):  # after the last committed step, or one ahead of it
            held = worker.have.get(Datum("params", worker.seat.stage, None, step))
            if held is not None and step <= self.steps + 1:
                if held != self.reference.weights[step][worker.seat.stage]:
                    self.say(f"seat {worker.seat} has wrong weights behind step {step - 1}")
                return
        self.say(f"seat {worker.seat} has no weights behind step {committed}, which is committed")

    # --- at the end ---------------------------------------------------------------------------------

    def finished(self, cluster: Any, may_end: bool) -> None:
        """``may_end``: the troubles leave some stage without a worker, or too few workers in touch."""
        ended = cluster.membership.ended
        if ended is not None and ended.failed and not may_end:
            self.say(f"the job has ended although it could go on: {ended.reason}")
        for worker in cluster.workers.values():
            if worker.alive and worker.runs and not worker.stuck:
                self.say(f"seat {worker.seat} waits for {worker.waits_for}" if worker.waiting else f"seat {worker.seat} has not ended")
            if self.budget is not None and worker.peak_kept > self.budget:
                self.say(f"seat {worker.seat} has kept {worker.peak_kept} boundary tensors with a budget of {self.budget}")
            for step, losses in worker.losses.items():  # what went down with a worker of a step that all had applied is missing, and said so
                if not losses.items() <= self.reference.losses[step].items() or losses != self.reference.losses[step] and not cluster.membership.lost:
                    self.say(f"seat {worker.seat} was told wrong losses of step {step}")
            if worker.alive and worker.rank not in cluster.membership.lost and worker.reason is None and not worker.runs:
                self._right_weights(worker, self.steps)
        if ended is None and self._committed < self.steps:
            self.say(f"only {self._committed} of {self.steps} steps are committed")
