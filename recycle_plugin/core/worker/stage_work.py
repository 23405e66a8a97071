"""The work of a stage that is replayed, step by step: its instructions, where their inputs come from, and the end of a
step (core/worker/replay.py).
"""

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
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Waits, execute
from recycle_plugin.core.worker.step_log import CommittedStep, ReplayLogs
from recycle_plugin.core.worker.step_store import StepStore

T = TypeVar("T")


class WorkingMachine(Protocol):
    """What does a stage's work again by what is logged; generators as in core.worker.worker.Machine."""

    def wait_logged(self, what: str, ready: Callable[[], T | None], made: bool) -> Waits[T]:
        """Yields until ``ready()`` is not None, looking again and again; that is the value.  ``what``: what of the logs
        it waits for; ``made``: that was made long ago, and is there or will never be, or else another stage makes it
        while it is replayed.  Raises JobEnded, and CantReplay where it does not come.
        """

    def logs(self) -> ReplayLogs:
        """The logs of all workers of the job."""

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """Waits for the time that ``instruction`` takes, where no computing does."""

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """Makes what LOAD, F, I, W, B or STEP provides, of what the store has."""


class ReplayingMachine(WorkingMachine, Protocol):
    """The part of a worker's machine that a replay needs; generators as in core.worker.worker.Machine."""

    @property
    def control_view(self) -> ControlView:
        """What this worker knows of the control plane."""

    def send(self, message: object) -> None:
        """Sends ``message`` to the coordinator."""

    def clock(self) -> float:
        """The time in seconds."""

    def restore(self, replay: Replay) -> Waits[int]:
        """Takes the state of this worker's stage from a checkpoint; the value is its bytes.  Raises CantReplay."""

    def forget_sums(self, after: int) -> None:
        """Drops the weight gradients of the steps after ``after`` that were added up here."""

    def set_for(self, step: int) -> None:
        """Sets what the script, which has been at ``step`` before, had set for it: learning rates and the like."""

    def differs(self, made: Any, sent: Any) -> str:
        """By how much what was made once more is something else than what was sent, in words; "" where it is the same,
        up to what the order of sums changes.
        """

    def add_up_alone(self, instruction: Instruction, have: StepStore) -> Any:
        """The sum of a REDUCE over all contributions of the stage, which are all here."""

    def tied_of(self, logged: Any) -> Any:
        """What TIE leaves at this stage's workers, of what another stage of the tie has logged of it."""


OTHERWISE = (
    "a replay does not know where a script changes weights between steps, or a layer draws random numbers of its own"
)


class CantReplay(Exception):
    """The stage can't be replayed, and why.  ``stage``: the one that could make once more what is missing;
    ``checkpoint``: the path of the one that can't be read, if that is why.
    """

    def __init__(self, why: str, stage: int | None = None, checkpoint: str = "") -> None:
        super().__init__(why)
        self.stage, self.checkpoint = stage, checkpoint


class Undisturbed:
    """What is the same in all runners of a replay (core.worker.executor.InstructionRunner): no change of the membership
    interrupts it, no fault strikes, and its spans are nobody's.
    """

    def check_generation(self) -> None:
        """Goes on whoever is lost meanwhile."""

    def now_us(self) -> int:
        """No time at all."""
        return 0

    def reach(self, when: str, seat: Seat, instruction: Instruction) -> None:
        """Lets no fault strike."""

    def record(self, span: Span) -> None:
        """Counts nothing: a replay says itself how long it has taken."""


class StageWork(Undisturbed):
    """What a stage does with micro-batches of committed steps, by what the logs have, on ``machine`` and in ``store``,
    in a pipeline of ``shape``.

    ``splits``: backwards are split; ``keep(datum, value)`` is given what a log has to have of it, once it is there.
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
        """Gives ``value`` to whoever keeps what a log has to have."""
        self._keep(datum, value)

    def run(self, step: int, micro_batches: Sequence[MicroBatch]) -> Iterator[Any]:
        """Does all of it with ``micro_batches``.  Raises JobEnded and CantReplay.

        One after the other; where the stages behind this one are replayed meanwhile, forwards go before backwards by as
        many as these are, so that all of them work at once (1F1B).
        """
        begun, ahead = 0, self._behind()
        for done, micro_batch in enumerate(micro_batches):
            while begun < min(done + 1 + ahead, len(micro_batches)):
                yield from execute(self._store.seat, self._forward(step, micro_batches[begun]), self)
                begun += 1
            yield from execute(self._store.seat, self._backward(step, micro_batch), self)

    def _behind(self) -> int:
        """How many stages behind this one, without one between, are replayed meanwhile."""
        last = self._stage
        while last + 1 in self.others:
            last += 1
        return last - self._stage

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """Waits until what ``instruction`` needs is read from the logs."""
        for datum in list(self._store.missing(instruction)):
            yield from self._fetch(datum)

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """Computes, and keeps for the log what would travel: another stage may have to be replayed later."""
        yield from self._machine.spend(instruction)
        self._store.run(instruction, self._machine.compute)
        for datum in provides(instruction):
            if datum.kind in TRAVELS and datum in self._store:
                self.keep(datum, self._store.move(datum, -1))

    def step_record(self, step: int) -> Waits[CommittedStep]:
        """The record of ``step``, which is committed.  Raises as :meth:`run`."""
        return (yield from self.wait(f"the record of step {step}", lambda: self.logs.record(step), True))

    def tied(self, others: Collection[int], step: int) -> Waits[Any]:
        """The sum over the stages that share weights, which any of ``others`` has logged.  Raises as :meth:`run`."""

        def logged() -> Any:
            found = (self.logs.get(Datum("tied", other, None, step)) for other in others)
            return next((value for value in found if value is not None), None)

        what = f"the sum over tied weights of step {step}"
        return (yield from self.wait(what, logged, not self.others.issuperset(others)))

    def wait(self, what: str, look: Callable[[], T | None], made: bool, stage: int | None = None) -> Waits[T]:
        """What ``look()`` finds in the logs, as soon as that is there; see WorkingMachine.wait_logged.  ``stage``: who
        could make it once more.
        """

        def found() -> T | None:
            if self.others and (why := self.refused()):
                raise CantReplay(f"what other stages need of stage {self._stage} can't be logged: {why}")
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
    """What a stage that is replayed ends a step with: its sums, which are made here of all that there is, and STEP, as
    ``record`` says; ``work`` has the rest of the step.  ``times``: how long what takes.
    """

    def __init__(
        self, machine: ReplayingMachine, store: StepStore, work: StageWork, record: CommittedStep, times: PartTimes
    ) -> None:
        self._machine, self._store, self._work, self._record, self._times = machine, store, work, record, times

    def run(self, tie: Collection[int]) -> Iterator[Any]:
        """Ends the step.  ``tie``: the stages that share weights with this one, if there are any."""
        self._tie, chunk = tie, self._store.seat.chunk
        ops = (Op.REDUCE, *[Op.TIE] * bool(tie), Op.STEP)
        program = (Instruction(op, chunk, None, self._record.step) for op in ops)
        yield from execute(self._store.seat, program, self)

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """Waits for the sum over the stages that share weights, which any other of them has logged."""
        if instruction.op is Op.TIE:
            others = [chunk for chunk in self._tie if chunk != seat.chunk]
            self._tied = yield from self._work.tied(others, instruction.step)

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """Carries REDUCE, TIE or STEP out."""
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
    """How long the parts of a replay have taken, in seconds of ``clock``, by their names."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """A context whose time counts as that of ``part``."""
        began = self._clock()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + self._clock() - began
