"""Training by stages of the plugin: two workers a stage, as of two replicas, and work that moves between them.

A micro-batch is run by its own replica's workers, but for one that is rerouted in each step, and for those of a worker
that dies in mid-step: its peer runs them again, as far as they were.  Some forwards and input gradients are run bare,
as for a peer that has lost them. The weight gradients of some micro-batches follow their input gradients at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from recycle_plugin.adapters.deepspeed.model import keyed_forward
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.stage.block_sums import BlockSums
from recycle_plugin.runtime.stage.boundary import Tensors
from recycle_plugin.runtime.stage.gradient_store import TorchGradients
from recycle_plugin.runtime.stage.ports import StageModel
from recycle_plugin.runtime.stage.randomness import key as random_key
from recycle_plugin.runtime.stage.split_backward import DeferredWeights
from recycle_plugin.runtime.stage.stage import Stage
from tests.support.stored_stage import StoredStage

from .model import BATCH, MICRO_BATCHES, REPLICAS, SEED, Course, Journal, Model, Stretch, batches, build
from .outcome import Outcome, Trained, differ

Worker = tuple[int, int]  # replica (with blocks: the block's number), stage


class Alone:
    """A stage's only live worker, as runtime.stage.block_sums.Group."""

    def live_position(self) -> tuple[int, int]:
        return 0, 1

    def exchange(self, target: Tensor, source: Tensor, incoming: list[int], outgoing: list[int]) -> None:
        target.copy_(source)


class Seat:
    """One worker."""

    def __init__(self, model: Model, number: int, module: Stretch, course: Course) -> None:
        self.number, self.module = number, module
        first, last = number == 0, number == len(model.stages) - 1
        self.trained = Trained(model, self.module)
        self.deferred = DeferredWeights(self.module) if course.mode != "fused" else None
        blocks = (
            Policy(block=course.block).blocks(Topology(REPLICAS, len(model.stages), MICRO_BATCHES))
            if course.block
            else None
        )
        self.sums = BlockSums(TorchGradients(self.trained.parameters), blocks) if blocks else None
        described = StageModel(self.module, self.module.loss, MICRO_BATCHES, first, last, CPU)
        self.stage = StoredStage(
            Stage(described, self.deferred, self._randomness, self.sums, self.trained.masters),
            number,
            len(model.stages),
        )
        self.order: list[MicroBatch] = []  # of this step's sums
        self.waiting: list[MicroBatch] = []  # between I and W
        self.at_once: frozenset[MicroBatch] = frozenset()  # W comes right after I
        self.begins = True  # has run no forward yet

    def _randomness(self, micro_batch: MicroBatch, step: int, half: str = "") -> Any:
        return keyed_forward(
            self.module, random_key(SEED, step, micro_batch, self.number, half), micro_batch.index, CPU
        )

    def contributions(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.trained.parameters]

    def total_of_blocks(self) -> list[Tensor]:
        owners, parameters = self.sums.owners(Alone()), self.trained.parameters
        return [
            self.sums.total([place], owners, Alone()).view_as(parameter) for place, parameter in enumerate(parameters)
        ]


class Plugin:
    def __init__(self, model: Model, course: Course) -> None:
        self.model, self.course, self.journal = model, course, Journal()
        self.count = len(model.stages)
        built = [build(model, self.journal) for _ in range(REPLICAS)]
        self.seats = {
            (replica, stage): Seat(model, stage, built[replica][stage], course)
            for stage in range(self.count)
            for replica in range(REPLICAS)
        }
        self._draw, self._at_once = random.Random(course.seed), random.Random(course.seed)
        self._dead: Worker | None = None

    def step(self, step: int) -> Outcome:
        self._now, self._made, self._batch = step, Outcome(), batches(self.model, step)
        for seat in self.seats.values():
            seat.module.train()
            seat.order, seat.waiting = [], []
            seat.at_once = frozenset(self._at_once.sample(BATCH, len(BATCH) // 2))
            if (choice := seat.stage.stage.choice) is not None:
                halves = [Instruction(op, seat.number, one, step) for one in seat.at_once for op in (Op.I, Op.W)]
                choice.begin(StepProgram(step, tuple(halves), resumed=True))  # resumed: nothing is measured
        self._by, self._done = self._takers(), {}
        moves = list(self._moves())
        strikes = self._draw.randrange(len(moves)) if self.course.dies and step == self.course.steps else None
        for number, (op, micro_batch) in enumerate(moves):
            if number == strikes:
                self._die()
            self._run(op, micro_batch)
        for worker in self._live():
            self._drain(worker, 0)
        self._finish()
        return self._made

    def orders(self) -> dict[Worker, list[MicroBatch]]:
        if self.course.block is None:
            return {worker: self.seats[worker].order for worker in self._live()}
        found: dict[Worker, list[MicroBatch]] = {}
        for replica, stage in self._live():
            for one in self.seats[replica, stage].order:
                found.setdefault((one.replica * MICRO_BATCHES + one.index // self.course.block, stage), []).append(one)
        return found

    def _takers(self) -> dict[tuple[int, MicroBatch], Worker]:
        rerouted = self._draw.randrange(self.count), self._draw.choice(BATCH)
        wanted = {
            (stage, one): (one.replica + ((stage, one) == rerouted)) % 2 for stage in range(self.count) for one in BATCH
        }
        if self.course.block is not None:
            holders = [self._draw.randrange(REPLICAS) for _ in range(self.count)]
            wanted = {(stage, one): holders[stage] for stage, one in wanted}
        return {(stage, one): self._alive((replica, stage)) for (stage, one), replica in wanted.items()}

    def _alive(self, worker: Worker) -> Worker:
        return worker if worker != self._dead else (1 - worker[0], worker[1])

    def _live(self) -> list[Worker]:
        return [worker for worker in self.seats if worker != self._dead]

    def _moves(self) -> Iterator[tuple[str, MicroBatch]]:
        """All forwards and backwards in one order of the micro-batches, as many forwards ahead as it comes."""
        order = self._draw.sample(BATCH, len(BATCH))
        if self.course.block is not None:  # in their turn
            turns = {
                replica: iter(sorted(one for one in BATCH if one.replica == replica)) for replica in range(REPLICAS)
            }
            order = [next(turns[one.replica]) for one in order]
        forwards, backwards = 0, 0
        while backwards < len(order):
            if forwards < len(order) and (forwards == backwards or self._draw.random() < 0.6):
                yield "F", order[forwards]
                forwards += 1
            else:
                yield "I", order[backwards]
                backwards += 1

    def _run(self, op: str, micro_batch: MicroBatch) -> None:
        for stage in range(self.count) if op == "F" else reversed(range(self.count)):
            self._forward(stage, micro_batch) if op == "F" else self._backward(stage, micro_batch)
        self._done[micro_batch] = op
        for worker in self._live():
            self._drain(worker, self._draw.randrange(3))

    # --- one instruction ----------------------------------------------------------------------------

    def _feed(self, worker: Worker, micro_batch: MicroBatch) -> None:
        stage, key = self.seats[worker].stage, (self._now, micro_batch)
        if worker[1] in (0, self.count - 1):
            stage.load(key, self._batch[micro_batch])
        if worker[1]:
            stage.receive_activation(key, copies(self._made.activations[worker[1] - 1, micro_batch]))

    def _feed_grad(self, worker: Worker, micro_batch: MicroBatch) -> None:
        if worker[1] < self.count - 1:
            self.seats[worker].stage.receive_grad(
                (self._now, micro_batch), copies(self._made.gradients[worker[1], micro_batch])
            )

    def _forward(self, number: int, micro_batch: MicroBatch) -> None:
        worker, key = self._by[number, micro_batch], (self._now, micro_batch)
        if number < self.count - 1 and self._again():
            other = self._anybody(number)
            self._feed(other, micro_batch)
            self._keep(
                self._made.activations, (number, micro_batch), self.seats[other].stage.forward(key, boundary_only=True)
            )
        made = self._told_forward(worker, micro_batch)
        if number < self.count - 1:
            self._keep(self._made.activations, (number, micro_batch), made)
        else:
            self._made.losses[micro_batch] = self.seats[worker].stage.losses[key]

    def _told_forward(self, worker: Worker, micro_batch: MicroBatch) -> Tensors:
        self._feed(worker, micro_batch)
        seat = self.seats[worker]
        before = seat.begins, seat.deferred and seat.deferred.fused
        self.journal.now = self._now, micro_batch, True
        made = seat.stage.forward((self._now, micro_batch))
        self.journal.now, seat.begins = None, False
        if before != (False, seat.deferred and seat.deferred.fused):
            self.journal.again.add((self._now, micro_batch, worker[1]))
        return made

    def _backward(self, number: int, micro_batch: MicroBatch) -> None:
        worker = self._by[number, micro_batch]
        seat, key = self.seats[worker], (self._now, micro_batch)
        self._feed_grad(worker, micro_batch)
        at_once = micro_batch in seat.at_once
        if at_once:
            self._drain(worker, 0)
        self.journal.now = self._now, micro_batch, False
        made = seat.stage.backward_input(key) if self.course.mode == "split" else seat.stage.backward(key)
        self.journal.now = None
        if number:
            self._keep(self._made.gradients, (number - 1, micro_batch), made)
        seat.order.append(micro_batch)
        if self.course.mode == "split":
            seat.waiting.append(micro_batch)
        if at_once:
            self._drain(worker, 0)
        if number and self._again():
            other = self._anybody(number)
            self._feed(other, micro_batch)
            self.seats[other].stage.forward(key)
            self._feed_grad(other, micro_batch)
            self._keep(
                self._made.gradients,
                (number - 1, micro_batch),
                self.seats[other].stage.backward_input_boundary_only(key),
            )

    def _drain(self, worker: Worker, leave: int) -> None:
        seat = self.seats[worker]
        while len(seat.waiting) > leave:
            micro_batch = seat.waiting.pop(0)
            self.journal.now = self._now, micro_batch, False
            seat.stage.backward_weight((self._now, micro_batch))
            self.journal.now = None

    def _again(self) -> bool:
        return self.course.again and self._draw.random() < 0.3

    def _anybody(self, stage: int) -> Worker:
        return self._draw.choice([worker for worker in self._live() if worker[1] == stage])

    def _keep(self, kept: dict, key: tuple[int, MicroBatch], made: Tensors) -> None:
        """What was made before has to be made again.

        It stays as it is given, as what was sent does; a peer gets a copy.
        """
        before = kept.setdefault(key, made)
        if len(before) != len(made) or any(differ(*each) for each in zip(before, made)):
            raise AssertionError(
                f"what stage {key[0]} gives or gets of micro-batch {key[1]} is something else when it is run once more"
            )

    # --- a death ------------------------------------------------------------------------------------

    def _die(self) -> None:
        self._dead = dead = self._draw.choice(list(self.seats))
        lost = [one for one in self._done if self._by[dead[1], one] == dead]
        self._by = {key: self._alive(worker) for key, worker in self._by.items()}
        for micro_batch in lost:
            self.journal.forget(self._now, micro_batch, dead[1])
            made = self._told_forward(self._by[dead[1], micro_batch], micro_batch)
            if dead[1] < self.count - 1:
                self._keep(self._made.activations, (dead[1], micro_batch), made)
        for micro_batch in lost:
            if self._done[micro_batch] == "I":
                self._backward(dead[1], micro_batch)

    # --- the end of a step --------------------------------------------------------------------------

    def _finish(self) -> None:
        for worker in self._live():
            held = self.seats[worker].stage.held()
            assert held == {Datum("wgrad", worker[1], one, self._now) for one in self.seats[worker].order}, (
                f"{worker} holds {held}"
            )
        for stage in range(self.count):
            seats = [self.seats[worker] for worker in self._live() if worker[1] == stage]
            total = self._total(seats)
            self._made.sums |= {(stage, name): each for name, each in zip(seats[0].trained.names, total, strict=True)}
            for seat in seats:
                seat.trained.step(total, self._now)
                seat.stage.summed(self._now)
                seat.stage.committed(self._now)
            self._made.weights |= seats[0].trained.weights(stage)
        # a peer may need them once more, whatever has been stepped
        for kept in (self._made.activations, self._made.gradients):
            kept.update({key: copies(tensors) for key, tensors in kept.items()})

    def _total(self, seats: list[Seat]) -> list[Tensor]:
        if self.course.block is None:
            return seats[0].trained.total([seat.contributions() for seat in seats])
        return next(seat for seat in seats if seat.order).total_of_blocks()


def copies(tensors: Tensors) -> Tensors:
    """As through the transport: in memory of their own, contiguous."""
    return tuple(tensor.detach().contiguous().clone() for tensor in tensors)
