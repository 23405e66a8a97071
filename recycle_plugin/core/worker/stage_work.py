"""The work of a replayed stage: its instructions, their inputs, and the end of a step (core/worker/replay.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from recycle_plugin.core.messages.from_coordinator import Replay
from recycle_plugin.core.vocabulary.dataflow import TRAVELS, Datum, provides
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.control_view import ControlPort
from recycle_plugin.core.worker.executor import Waits, execute
from recycle_plugin.core.worker.step_log import CommittedStep, ReplayLogs
from recycle_plugin.core.worker.step_store import StepStore

T = TypeVar("T")


class WorkingMachine(Protocol):
    """The machine that repeats a stage's work from logs. Generators as in core.worker.machine.Machine."""

    def wait_logged(self, what: str, ready: Callable[[], T | None], made: bool) -> Waits[T]:
        """Yield until ``ready()``, polled, is not None, the value. ``what``: the log entry that it waits for. ``made``:
        it was made long ago, and is there or will never be; else another stage makes it in its replay. Raises JobEnded,
        and CantReplay if it does not come.
        """

    def logs(self) -> ReplayLogs:
        """Return the logs of all workers of the job."""

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """Wait for the time that ``instruction`` takes, if no computing does."""

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """Compute the results of LOAD, F, I, W, B or STEP from the store's data."""


class ReplayingMachine(ControlPort, WorkingMachine, Protocol):
    """The part of a worker's machine that a replay needs; generators as in core.worker.machine.Machine."""

    def clock(self) -> float:
        """Return the time in seconds."""

    def restore(self, replay: Replay) -> Waits[int]:
        """Load the state of this worker's stage from a checkpoint; the value is its bytes. Raises CantReplay."""

    def forget_sums(self, after: int) -> None:
        """Drop the weight gradients of the steps after ``after`` that were summed here."""

    def set_for(self, step: int) -> None:
        """Set the values that the script had set for ``step``, which it has passed: learning rates and the like."""

    def differs(self, made: Any, sent: Any) -> str:
        """Return in words how ``made`` differs from ``sent``; "" if another order of sums explains it."""

    def add_up_alone(self, instruction: Instruction, have: StepStore) -> Any:
        """Return the sum of a REDUCE over all contributions of the stage, which are all here."""

    def tied_of(self, logged: Any) -> Any:
        """Return the result of TIE for this stage, from the sum that another stage of the tie has logged."""


OTHERWISE = (
    "a replay does not know where a script changes weights between steps, or a layer draws random numbers of its own"
)


class CantReplay(Exception):
    """The stage can't be replayed. ``stage``: the stage that can make the missing data; ``checkpoint``: the path of an
    unreadable checkpoint.
    """

    def __init__(self, why: str, stage: int | None = None, checkpoint: str = "") -> None:
        super().__init__(why)
        self.stage, self.checkpoint = stage, checkpoint


class Undisturbed:
    """What runners of a replay share: no membership change interrupts it, no fault strikes, no span is recorded."""

    def check_generation(self) -> None:
        """Go on, whoever is lost meanwhile."""

    def now_us(self) -> int:
        """Return 0: a replay's spans are not measured."""
        return 0

    def reach(self, when: str, seat: Seat, instruction: Instruction) -> None:
        """Let no fault strike."""

    def record(self, span: Span) -> None:
        """Count nothing: a replay reports its own times."""


class StageWork(Undisturbed):
    """A stage's work on micro-batches of committed steps, from the logs, on ``machine`` and in ``store``, in a pipeline
    of ``shape``. ``splits``: backwards are split; ``keep(datum, value)`` gets the data that belongs in a log.
    """

    def __init__(
        self,
        machine: WorkingMachine,
        store: StepStore,
        shape: Topology,
        splits: bool,
        keep: Callable[[Datum, Any], None],
    ) -> None:
        self._machine, self._store, self._shape, self._splits, self._keep = machine, store, shape, splits, keep
        self._stage, self.logs = store.seat.stage, machine.logs()
        self.others: frozenset[int] = frozenset()  # stages that are replayed meanwhile
        self.refused: Callable[[], str] = str  # why what these need is not logged here

    def keep(self, datum: Datum, value: Any) -> None:
        """Keep ``value``, which belongs in a log."""
        self._keep(datum, value)

    def run(self, step: int, micro_batches: Sequence[MicroBatch]) -> Iterator[Any]:
        """Run all of ``micro_batches``, one after the other. Raises JobEnded and CantReplay. If the stages behind this
        one are replayed meanwhile, forwards lead backwards by their number, so that all work at once (1F1B).
        """
        begun, ahead = 0, self._behind()
        for done, micro_batch in enumerate(micro_batches):
            while begun < min(done + 1 + ahead, len(micro_batches)):
                yield from execute(self._store.seat, self._forward(step, micro_batches[begun]), self)
                begun += 1
            yield from execute(self._store.seat, self._backward(step, micro_batch), self)

    def _behind(self) -> int:
        """Return how many stages directly after this one are being replayed too."""
        last = self._stage
        while last + 1 in self.others:
            last += 1
        return last - self._stage

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """Wait until the inputs of ``instruction`` are read from the logs."""
        for datum in self._store.missing(instruction):
            yield from self._fetch(datum)

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """Compute, and keep the data that would travel for the log: another stage may have to be replayed later."""
        yield from self._machine.spend(instruction)
        self._store.run(instruction, self._machine.compute)
        for datum in provides(instruction):
            if datum.kind in TRAVELS and datum in self._store:
                self.keep(datum, self._store.move(datum, -1))

    def step_record(self, step: int) -> Waits[CommittedStep]:
        """Return the record of the committed ``step``. Raises as :meth:`run`."""
        return (yield from self.wait(f"the record of step {step}", lambda: self.logs.record(step), True))

    def tied(self, others: Collection[int], step: int) -> Waits[Any]:
        """Return the sum over stages that share weights, as any of ``others`` has logged it. Raises as :meth:`run`."""

        def logged() -> Any:
            found = (self.logs.get(Datum("tied", other, None, step)) for other in others)
            return next((value for value in found if value is not None), None)

        what = f"the sum over tied weights of step {step}"
        return (yield from self.wait(what, logged, not self.others.issuperset(others)))

    def wait(self, what: str, look: Callable[[], T | None], made: bool, stage: int | None = None) -> Waits[T]:
        """Wait until ``look()`` finds its entry in the logs (WorkingMachine.wait_logged). ``stage``: the stage that
        could make it again.
        """

        def found() -> T | None:
            if self.others and (why := self.refused()):
                raise CantReplay(f"the data of stage {self._stage} for other stages can't be logged: {why}")
            return look()

        try:
            return (yield from self._machine.wait_logged(what, found, made))
        except CantReplay as error:
            faults = self.logs.faults()
            raise CantReplay(f"{error}{f', where {faults}' * bool(faults)}", stage) from None

    def _forward(self, step: int, micro_batch: MicroBatch) -> list[Instruction]:
        loads = self._stage in (0, self._shape.stages - 1)
        return [Instruction(op, self._store.seat.chunk, micro_batch, step) for op in (*[Op.LOAD] * loads, Op.F)]

    def _backward(self, step: int, micro_batch: MicroBatch) -> list[Instruction]:
        ops = (Op.I, Op.W) if self._splits else (Op.B,)
        return [Instruction(op, self._store.seat.chunk, micro_batch, step) for op in ops]

    def _fetch(self, datum: Datum) -> Iterator[Any]:
        made, stage = datum.stage not in self.others, datum.stage if datum.kind in TRAVELS else None

        def look() -> Any:
            value = self.logs.get(datum)
            if value is None and made and self.logs.damaged(datum):
                raise CantReplay(f"{datum} is damaged or lost")
            return value

        value = yield from self.wait(str(datum), look, made, stage)
        self._store.put(datum, value)
        if datum.kind not in TRAVELS:
            self.keep(datum, value)


class StepEnd(Undisturbed):
    """How a replayed stage ends a step: its sums, made here of all contributions, and STEP, by ``record``. ``work`` has
    the rest of the step; ``times`` measures the parts.
    """

    def __init__(
        self, machine: ReplayingMachine, store: StepStore, work: StageWork, record: CommittedStep, times: PartTimes
    ) -> None:
        self._machine, self._store, self._work, self._record, self._times = machine, store, work, record, times

    def run(self, tie: Collection[int]) -> Iterator[Any]:
        """End the step. ``tie``: the stages that share weights with this one, if there are any."""
        self._tie, chunk = tie, self._store.seat.chunk
        ops = (Op.REDUCE, *[Op.TIE] * bool(tie), Op.STEP)
        program = (Instruction(op, chunk, None, self._record.step) for op in ops)
        yield from execute(self._store.seat, program, self)

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """Wait for the sum over the stages that share weights, which any other of them has logged."""
        if instruction.op is Op.TIE:
            others = [chunk for chunk in self._tie if chunk != seat.chunk]
            self._tied = yield from self._work.tied(others, instruction.step)

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """Carry out REDUCE, TIE or STEP."""
        (made,) = provides(instruction)
        if instruction.op is Op.REDUCE:
            with self._times.of("reduce"):
                self._store.conclude(instruction, {made: self._machine.add_up_alone(instruction, self._store)})
        elif instruction.op is Op.TIE:
            self._work.keep(made, self._tied)
            self._store.put(made, self._machine.tied_of(self._tied))
        else:
            if self._record.norm is not None:
                self._store.put(self._store.of_layers("norm", instruction.step), self._record.norm)
            with self._times.of("step"):
                yield from self._machine.spend(instruction)
                self._store.run(instruction, self._machine.compute)


class PartTimes:
    """How long the parts of a replay have taken, in seconds of ``clock``, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Return a context whose duration is added to ``part``."""
        began = self._clock()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + self._clock() - began
