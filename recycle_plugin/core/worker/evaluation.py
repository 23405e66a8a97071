"""Evaluations between steps, by the live workers: every worker gets the losses, or all evaluate again.

They run through the one executor, as steps with negative numbers: ``1F0.2@-3`` is a forward of the third evaluation.

Stock DeepSpeed reads a micro-batch twice: its inputs by the worker of the replica's first stage, its labels by that of
the last. Each of these *ends* has read the whole batch, so if one is lost the other serves for both. If both are, the
replica's batches are out of reach, and the evaluation goes without them. Whoever runs a micro-batch gets its data from
a reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from recycle_plugin.core.messages.from_workers import Note
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.evaluation_route import readers, runner
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.worker.executor import Interrupted, Waits
from recycle_plugin.core.worker.iterator_data import KIND
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.core.worker.machine import Machine
from recycle_plugin.core.worker.training_loop import TrainingLoop
from recycle_plugin.core.worker.worker import Worker

Forwards = Callable[[Plan, Seat, int, int], Iterable[Instruction]]  # planner.forwards.forwards


class Evaluations:
    """The evaluations of ``worker``, trained by ``loop``. ``recover()`` follows a membership change between steps."""

    def __init__(
        self,
        machine: Machine,
        worker: Worker,
        loop: TrainingLoop,
        forwards: Forwards,
        recover: Callable[[], Iterator[Any]],
    ) -> None:
        self._machine, self._worker, self._loop, self._seat = machine, worker, loop, worker.seat
        self._forwards, self._recover = forwards, recover
        self._number = 0

    def count_on(self, number: int) -> None:
        """Go on after evaluation ``number``, the last that the others did before this worker joined."""
        self._number = number

    def run(self, batches: Sequence[Any], count: int) -> Waits[dict[str, Loss]]:
        """Evaluate ``count`` micro-batches of each replica; the value is the loss of each, by name. ``batches``: the
        ``count`` that this worker has read, if it is an end of its replica. A membership change repeats all of it.
        """
        self._number += 1
        while True:
            yield from self._loop.settle()
            try:
                return (yield from self._run(self._loop.plan, batches, count))
            except Interrupted:
                pass
            finally:
                # before this worker regroups: after that others may have sent what is evaluated once more
                self._worker.forget_evaluation(-self._number)
            yield from self._recover()

    def _run(self, plan: Plan, batches: Sequence[Any], count: int) -> Waits[dict[str, Loss]]:
        number, read_by = -self._number, readers(plan.view)
        self._say_missing(plan, read_by)
        for micro_batch, stage in self._mine(plan, read_by, count):
            self._hand_out(plan, Datum(KIND, stage, micro_batch, number), batches[micro_batch.index])
        program = tuple(self._forwards(plan, self._seat, number, count))
        givers = {
            Datum(KIND, one.stage, one.micro_batch, number): read_by[one.works_on.replica][one.stage > 0]
            for one in program
            if one.op is Op.LOAD
        }
        yield from self._worker.execute(
            StepProgram(number, program, frozenset(one for one in program if one.op is Op.F), givers=givers)
        )
        end = Barrier(Meets.EVALUATED, number=self._number)
        return (yield from self._loop.barrier(end, self._worker.losses(number))).values

    def _mine(
        self, plan: Plan, read_by: Mapping[int, tuple[Seat, Seat]], count: int
    ) -> Iterator[tuple[MicroBatch, int]]:
        """Yield the micro-batches that this worker has read, each with the stage that it read them for."""
        for replica, ends in read_by.items():
            for stage, reader in {0: ends[0], plan.stages - 1: ends[1]}.items():
                if reader == self._seat:
                    yield from ((MicroBatch(replica, index), stage) for index in range(count))

    def _hand_out(self, plan: Plan, datum: Datum, batch: Any) -> None:
        """Give a batch to the worker that runs its micro-batch: this worker, unless a worker is lost."""
        taker = runner(plan, datum.stage, datum.made_of)
        if taker == self._seat:
            self._worker.store.put(datum, batch)
        else:
            self._machine.transfer(datum, batch, taker, self._worker.store.valid_from)

    def _say_missing(self, plan: Plan, read_by: Mapping[int, tuple[Seat, Seat]]) -> None:
        missing, control_view = (
            sorted(set(range(plan.view.topology.replicas)) - read_by.keys()),
            self._machine.control_view,
        )
        if missing and control_view.is_first:
            text = (
                f"evaluation {self._number} lacks the data of replicas {', '.join(map(str, missing))}, "
                "whose first or last stage is lost"
            )
            self._machine.send(Note(control_view.rank, "warning", text, {"replicas": missing}))
