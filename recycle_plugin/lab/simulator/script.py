"""A simulated training script: steps, and what is done between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from recycle_plugin.core.messages.activity import ELSEWHERE, Activity
from recycle_plugin.core.messages.from_workers import Durable, Fatal, Left, Vanishing
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.dataflow import of_layers
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.iterator_draws import Gone
from recycle_plugin.core.vocabulary.losses import numbers
from recycle_plugin.core.worker.checkpoint_saving import save
from recycle_plugin.core.worker.control_view import JobEnded
from recycle_plugin.core.worker.evaluation import Evaluations
from recycle_plugin.core.worker.executor import Interrupted, Waits
from recycle_plugin.core.worker.loop_ports import LEAVE, DataEnded
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.lab.simulator.arithmetic import Batch, sampled
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.scenario import MILLISECOND
from recycle_plugin.planner.forwards import forwards

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine

T = TypeVar("T")
PAUSE_US = 150 * MILLISECOND  # at least
WRITING_US = 5 * MILLISECOND  # a worker's share of a checkpoint


class Died(BaseException):
    """A worker is dead; raised in it to end its execution."""


class SimulatedScript:
    """The training script of the worker on ``machine``."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine, self._loop, self._scenario = machine, machine.loop, machine.cluster.scenario
        self._evaluations = Evaluations(machine, machine.worker, machine.loop, forwards, machine.loop.catch_up)
        self._evaluated = 0

    def run(self) -> Iterator[Any]:
        """Train, evaluate, save, pause and leave as the scenario says; yield what is waited for. Raises Died."""
        machine = self._machine
        machine.send(machine.ready())
        try:
            yield from self._train()
            machine.through = True
        except JobEnded as end:
            machine.reason = str(end)
        except Gone as gone:
            machine.reason = str(gone)
            machine.send(Fatal(machine.rank, machine.reason))
        if machine.rude:
            raise Died
        machine.worker.servings.close()
        machine.send(Left(machine.rank, planned=machine.reason == LEAVE, step=machine.step))

    def _train(self) -> Iterator[Any]:
        newcomer = self._machine.newcomer
        yield from self._loop.start() if newcomer is None else newcomer.start()
        if self._scenario.logs:
            newcomer = yield from self._save_first(newcomer)
        for step in range(1, self._scenario.steps + 1):
            self._machine.control_view.script_at = step
            if self._scenario.epoch and step > 1 and step % self._scenario.epoch == 1 % self._scenario.epoch:
                self._machine.begin_epoch(step)
            yield from self._set_rate(step, newcomer)
            if newcomer is None or not (yield from self._with_data(newcomer.train, step)):
                if newcomer is not None:
                    self._machine.set_for(step)  # data that has come from others meanwhile was of before
                let_in, newcomer = newcomer is not None, None
                self._machine.means[step] = yield from self._with_data(self._loop.train, step)
                self._machine.losses[step] = numbers(self._machine.control_view.losses(step))
                if let_in:
                    yield from self._count_on()
            for _, what in (each for each in self._scenario.between if each[0] == step):
                if newcomer is not None and (yield from self._is_over(newcomer, what, step)):
                    continue
                newcomer = None if what != "pause" else newcomer
                yield from {"evaluate": self._evaluate, "save": self._save, "pause": self._pause}[what](step)
            if 0 < self._machine.vanishes <= step and newcomer is None:
                yield from self._vanish(step)
        if newcomer is None:
            yield from self._loop.settle()
        if self._scenario.logs:
            yield from self._loop.finish()

    def _count_on(self) -> Iterator[Any]:
        """Ask the peers for something between steps for the first time; check where it counts on them to be."""
        machine = self._machine
        view = machine.control_view
        machine.counts = True
        while view.let_in_at is not None and view.whereabouts.missing():
            try:
                yield from machine.wait("where the others are", lambda: None if view.whereabouts.missing() else True)
            except Interrupted:
                yield from self._loop.catch_up()
        machine.counts = False
        machine.cluster.watcher.counts_on(machine)

    def _vanish(self, step: int) -> Iterator[Any]:
        """Call os._exit(0) after ``step``."""
        machine = self._machine
        yield from self._loop.settle()
        machine.through = step == self._scenario.steps
        machine.send(Vanishing(machine.rank, machine.step))
        machine.code = 0
        raise Died

    def _set_rate(self, step: int, newcomer: Newcomer | None) -> Iterator[Any]:
        """Set the learning rate of ``step``, and change the state if the script does so. A trainer first finishes what
        is to be applied with the last rate. What a newcomer's script writes too early is dropped.
        """
        if self._scenario.by_hand and newcomer is None:
            yield from self._loop.settle()
        if self._scenario.by_hand and not self._scenario.logs and (newcomer is None or newcomer.enters):
            self._machine.change_for(step)  # a log would not have that for a replay
        self._machine.set_for(step)

    def _with_data(self, train: Callable[[int], Waits[T]], step: int) -> Waits[T]:
        """Train ``step``, with other iterators if all have ended."""
        while True:
            try:
                return (yield from train(step))
            except DataEnded:
                self._machine.begin_epoch(step)

    def _save_first(self, newcomer: Newcomer | None) -> Waits[Newcomer | None]:
        """Save a checkpoint before the first step if the others do. Return ``newcomer`` if it is one still, or None."""
        if newcomer is not None and self._machine.control_view.committed:
            return newcomer
        if newcomer is not None and (yield from newcomer.train(0)) and (yield from self._is_over(newcomer, "save", 0)):
            return newcomer
        yield from self._save(0)
        return None

    def _is_over(self, newcomer: Newcomer, what: str, step: int) -> Waits[bool]:
        """Return whether what the others do together after ``step`` is over; else they wait for this newcomer at it."""
        if what == "pause":
            return False
        ends = {
            "evaluate": Barrier(Meets.EVALUATED, number=self._evaluated + 1),
            "save": Barrier(Meets.SAVED, _place(step)),
        }
        if (yield from newcomer.meets(ends[what])):
            return False
        if what == "evaluate":
            self._evaluated += 1
            self._evaluations.count_on(self._evaluated)
        return True

    def _pause(self, step: int) -> Iterator[Any]:
        """Do something else, longer on some workers than on others, and hear nothing meanwhile."""
        self._machine.at = Activity(ELSEWHERE, "the training script")
        yield PAUSE_US * (1 + (self._machine.rank + step) % 4) * self._machine.percent // 100

    def _evaluate(self, step: int) -> Iterator[Any]:
        """Evaluate more micro-batches than a step has; an end reads its own replica's."""
        machine, shape = self._machine, self._scenario.shape
        count, reads = shape.micro_batches + 1, machine.seat.stage in (0, shape.stages - 1)
        self._evaluated += 1
        batches = (
            [Batch(sampled(MicroBatch(machine.seat.replica, index), -self._evaluated)) for index in range(count)]
            if reads
            else []
        )
        losses = yield from self._evaluations.run(batches, count)
        machine.cluster.watcher.evaluated(machine, self._evaluated, count, step, numbers(losses))

    def _save(self, step: int) -> Iterator[Any]:
        machine = self._machine
        why = yield from save(
            self._loop,
            machine.control_view,
            _place(step),
            SimulatedFiles(machine, step),
            self._loop.catch_up,
        )
        machine.cluster.exercised[ProtocolRule.NOT_SAVED] += bool(why)
        machine.cluster.watcher.saved(machine, step, why)


def _place(step: int) -> str:
    return f"checkpoint of step {step}"


@dataclass(frozen=True)
class SimulatedFiles:
    """A checkpoint's files, as core.worker.checkpoint_saving.CheckpointFiles: each worker writes its stage's weight."""

    machine: SimulatedMachine
    step: int

    def write(self, number: int) -> Waits[str]:
        """Write this worker's weight for attempt ``number``. Return why it could not, or ""."""
        machine = self.machine
        yield WRITING_US * machine.percent // 100
        machine.reach("checkpoint.written")
        written, full = machine.cluster.written, self._is_full(str(machine.seat))
        written.setdefault((self.step, number), {})[machine.held] = (
            None if full else machine.store[of_layers("params", machine.seat, self.step + 1)]
        )
        state = machine.store[of_layers("params", machine.seat, self.step + 1)], dict(machine.numbers.moments)
        machine.cluster.saved.setdefault((self.step, machine.seat.stage), state)
        machine.cluster.exercised[ProtocolRule.SAVED_AGAIN] += any(
            step == self.step and other != number for step, other in written
        )
        return f"seat {machine.seat}: disk full" if full else ""

    def publish(self, number: int) -> Waits[str]:
        """Give the checkpoint of attempt ``number`` its name. Return why that failed, or ""."""
        machine = self.machine
        machine.reach("checkpoint.publish")
        yield WRITING_US * machine.percent // 100
        if self._is_full("latest"):
            return "latest: disk full"
        machine.cluster.watcher.published(machine, self.step, machine.cluster.written[self.step, number])
        if machine.cluster.scenario.logs:
            logged = machine.cluster.choose()
            place, valid_from = _place(self.step), machine.store.valid_from
            machine.send(Durable(machine.rank, self.step, place, valid_from, boundaries=logged))
        machine.reach("checkpoint.named")
        return ""

    def discard(self, number: int) -> Iterator[Any]:
        """Remove what was written of attempt ``number``."""
        yield WRITING_US * self.machine.percent // 100
        self.machine.cluster.watcher.discarded(self.machine, self.step, self.machine.cluster.written[self.step, number])

    def _is_full(self, where: str) -> bool:
        return (self.step, where) in self.machine.cluster.scenario.full
