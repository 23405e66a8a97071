"""A worker: what ``core.worker.training_loop`` calls replica and ``core.worker.executor`` calls world, the same for a
real one and for a simulated one.

What it has of uncommitted steps is in one store (core/worker/step_store.py); what it waits for is what the store lacks.
It says losses and shares of the norm, judges, and hands out what it draws from an iterator
(core/worker/iterator_data.py).  What is left is its *machine*: a clock, lines, and whoever computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, Protocol, TypeVar

from recycle_plugin.core.messages.contributions import LOSS, NORM, SHARE
from recycle_plugin.core.messages.protocol import Contribution
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.dataflow import Datum, provides
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import RECEIVES, SENDS, Instruction, Op
from recycle_plugin.core.vocabulary.iterator_draws import IteratorState
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Waits, execute
from recycle_plugin.core.worker.iterator_data import IteratorData
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.core.worker.stopwatch import Stopwatch
from recycle_plugin.core.worker.training_loop import StepProgram

T = TypeVar("T")
SUMMED = frozenset(
    {"inner", "wgrad", "reduced"}
)  # what is in a worker's sums: of layers whose backward is not split, from I on


class Machine(Protocol):
    """What a worker runs on.

    Generators yield what a simulated machine waits for; a real one blocks and yields nothing.
    """

    @property
    def control_view(self) -> ControlView: ...

    def wait(
        self, what: Callable[[], str] | str, ready: Callable[[], T | None], interruptible: bool = True
    ) -> Waits[T]:
        """As core.worker.training_loop.LoopPort's."""

    def wait_for(self, datum: Datum, source: Seat, ready: Callable[[], T | None]) -> Waits[T]:
        """The same for what comes from ``source``; where that takes too long, the coordinator has to hear of it, and
        has it sent again.
        """

    def wait_for_commit(self, step: int) -> Iterator[Any]:
        """... of ``step``, before the next one is applied."""

    def send(self, message: object) -> None:
        """To the coordinator."""

    def transfer(self, datum: Datum, value: Any, target: Seat, valid_from: int) -> None:
        """To a peer; comes out of its ``arrivals``."""

    def arrivals(self) -> Iterable[tuple[Datum, Any, int]]:
        """What has come from peers since this was asked last: datum, value, the sender's era."""

    def hear_out(self) -> None:
        """Take what the lost have sent before they went, and nothing of theirs that comes after this."""

    def leave(self, members: Iterable[str]) -> None:
        """Only the workers at these addresses are left."""

    def now_us(self) -> int: ...

    def reach(self, when: str, seat: Seat, instruction: Instruction) -> None:
        """As core.worker.executor.InstructionRunner's."""

    def record(self, span: Span) -> None: ...

    def running(self, program: StepProgram) -> AbstractContextManager[Iterable[Instruction]]:
        """It is meanwhile: these instructions."""

    def performing(self, instruction: Instruction) -> AbstractContextManager:
        """It is carried out meanwhile."""

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """The time that it takes, where no computing does."""

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """What LOAD, F, I, W, B or STEP makes."""

    def add_up(self, instruction: Instruction, have: StepStore, holder: Seat | None) -> Waits[Any]:
        """The value is the sum that REDUCE, or TIE, makes with all that take part.

        ``holder``: who has it, and gives it to the others.
        """

    def share(self, step: int, have: StepStore) -> float:
        """This stage's part of the squared norm of ``step``."""

    def norm(self, shares: Mapping[str, float]) -> Any:
        """Over all stages, from the share of each, by its number."""

    def number(self, loss: Any) -> float | int:
        """A loss, as it is said."""

    def undo(self, step: int) -> None:
        """Take the weights' last step, ``step``, back."""

    def forget_sums(self, after: int) -> None:
        """The weight gradients of the steps after ``after`` that were added up here count no more; of one step at most
        there are any.
        """


@dataclass(frozen=True)
class Judging:
    """``waits``: VALIDATE waits for the norm, by which the step is clipped; ``validates``: the norm is judged after the
    step (core/coordinator/step_validation.py).
    """

    waits: bool = False
    validates: bool = False


class Worker:
    """At ``store.seat``.

    ``stopwatch``: whether, and by which costs, it says how fast it computes.  ``applied(step)``: to be told of each
    step that is (core.worker.training_loop.TrainingLoop.applied).
    """

    def __init__(
        self,
        machine: Machine,
        shape: Topology,
        store: StepStore,
        steps: StepMachine,
        judging: Judging,
        iterator_data: IteratorData | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.store, self.seat = store, store.seat
        self._machine, self._control_view, self._shape, self._steps, self._judging, self.iterator_data = (
            machine,
            machine.control_view,
            shape,
            steps,
            judging,
            iterator_data,
        )
        self._stopwatch = stopwatch
        self.applied: Callable[[int], None] = lambda step: None
        self.program: StepProgram | None = None
        self._last_forward: Instruction | None = None

    @property
    def running(self) -> StepProgram:
        """``program``, once there is one."""
        assert self.program is not None, "nothing has been run yet"
        return self.program

    def resize(self, shape: Topology) -> None:
        """Steps have another number of micro-batches from now on."""
        self._shape = shape

    def rewind(self, step: int) -> None:
        """The state of ``step``, which all load, takes the place of the last one.

        They meet again then, and what comes later is of another era.
        """
        self.store.rewind(step, self._control_view.number + 1)
        if self.iterator_data is not None:
            self.iterator_data.rewind()

    # core.worker.training_loop.StepRunner

    def execute(self, program: StepProgram) -> Iterator[Any]:
        self.program = program
        self._last_forward = next((one for one in reversed(program.instructions) if one.op is Op.F), None)
        with self._machine.running(program) as instructions:
            self.forget_committed()
            if program.step > 0:
                self._begin(program)
            if program.resumed:
                self._say_losses(program.step)  # of forwards that the failure has cut off from their last one
            yield from execute(self.seat, instructions, self)

    def _begin(self, program: StepProgram) -> None:
        if self._stopwatch is not None:
            self._stopwatch.begin(program)
        if self.iterator_data is not None:
            self.iterator_data.provide(program.step, self._control_view)

    @property
    def valid_from(self) -> int:
        return self.store.valid_from

    def held(self) -> set[Datum]:
        self.forget_committed()
        return self.store.held()

    def held_draws(self) -> dict[str, str]:
        if self.store.reads_iterator:
            self._machine.hear_out()
        self._take_arrivals()
        return self.iterator_data.held_draws() if self.iterator_data is not None else {}

    def take_state(self, iterator_state: IteratorState) -> None:
        if self.iterator_data is not None:
            self.iterator_data.take_state(iterator_state)

    def undo(self, step: int) -> None:
        self._machine.undo(step)
        self.store.undo(step)

    def record_norm(self, step: int, norm: Any) -> None:
        self.store.put(self._norm(step), norm)

    def discard_after(self, after: int, valid_from: int) -> None:
        if any(datum.kind in SUMMED for datum in self.store.discard_after(after, valid_from)):
            self._machine.forget_sums(after)

    def leave(self, members: Iterable[str]) -> None:
        self._machine.leave(members)

    # core.worker.executor.InstructionRunner

    def check_generation(self) -> None:
        self._control_view.check()

    def now_us(self) -> int:
        return self._machine.now_us()

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """What comes from elsewhere, and, before a step, the commit of the one whose undo record it overwrites."""
        if instruction.op in RECEIVES or instruction.op is Op.LOAD:
            for datum in self.store.missing(instruction):
                yield from self._machine.wait_for(
                    datum, instruction.peer or self._giver(datum), partial(self._has, datum)
                )
        elif instruction.op is Op.STEP and not self._steps.may_apply(instruction.step):
            before = instruction.step - 1
            yield from self._machine.wait_for_commit(before)
            self._steps.commit(before)

    def reach(self, when: str, seat: Seat, instruction: Instruction) -> None:
        self._machine.reach(when, seat, instruction)

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        with self._machine.performing(instruction):
            yield from self._machine.spend(instruction)
            match instruction.op:
                case Op.REDUCE | Op.TIE:
                    yield from self._add_up(instruction)
                case Op.VALIDATE:
                    yield from self._validate(instruction.step)
                case Op.STEP:
                    self._step(instruction)
                case op if op in SENDS:
                    self._send(instruction)
                case op if op not in RECEIVES:
                    self._compute(instruction)

    def record(self, span: Span) -> None:
        if self._stopwatch is not None and span.instruction.step > 0:
            self._stopwatch.add(span)
        self._machine.record(span)

    # instructions

    def _compute(self, instruction: Instruction) -> None:
        boundary_only = instruction in self.running.boundary_only
        self.store.run(instruction, lambda one, have: self._machine.compute(one, have, boundary_only), boundary_only)
        if instruction == self._last_forward and instruction.step > 0:
            self._say_losses(instruction.step)

    def _send(self, instruction: Instruction) -> None:
        (datum,) = self.store.requires(instruction)
        assert instruction.peer is not None, f"{instruction} has no peer"
        self._machine.transfer(datum, self.store.move(datum, -1), instruction.peer, self.store.valid_from)
        self.store.sent(datum)

    def _add_up(self, instruction: Instruction) -> Iterator[Any]:
        """Nobody has it before all have come; where it is made again it comes out the same, and what is here stays."""
        (datum,) = provides(instruction)
        holder = self.running.holder if instruction.op is Op.REDUCE else None
        total = yield from self._machine.add_up(instruction, self.store, holder)
        if datum not in self.store:
            self.store.conclude(instruction, {datum: total})

    def _validate(self, step: int) -> Iterator[Any]:
        """Wait until all stages have their gradients, and where these are clipped, for the norm over them."""
        self._say_share(step, NORM, self._machine.share(step, self.store) if self._judging.waits else 0.0)
        shares = yield from self._machine.wait(
            f"all contributions to the {NORM} of step {step}", lambda: self._control_view.collected(step, NORM)
        )
        if self._judging.waits:
            self.record_norm(step, self._machine.norm(shares))

    def _step(self, instruction: Instruction) -> None:
        step = instruction.step
        if self._judging.validates and self._norm(step) not in self.store:
            self._validate_later(step)
        self.store.run(instruction, lambda one, have: self._machine.compute(one, have, False))
        if self._stopwatch is not None:
            self._machine.send(self._stopwatch.compute_time(self._control_view.rank, step))
        self.applied(step)

    def _validate_later(self, step: int) -> None:
        """The coordinator judges once it has all shares.

        One that is not finite leaves nothing to judge, and no way back for some undo.
        """
        share = self._machine.share(step, self.store)
        self._say_share(step, SHARE, share)
        if not isfinite(share):
            self.record_norm(step, share)

    # what it has and says

    def forget_evaluation(self, step: int) -> None:
        """The evaluation ``step`` (negative) is through, or given up, and what has come for it."""
        self._take_arrivals()
        self.store.forget_evaluation(step)

    def forget_committed(self) -> None:
        """Nobody will ask for anything of a committed step again."""
        self._take_arrivals()
        self.store.commit(self._control_view.committed)

    def losses(self, step: int) -> dict[str, float]:
        """By micro-batch, of those whose last stage has run here."""
        return {
            str(micro_batch): self._machine.number(loss) for micro_batch, loss in self.store.of("loss", step).items()
        }

    def _giver(self, datum: Datum) -> Seat:
        """From whom a batch comes that this worker has not read."""
        if datum.step < 0:
            return self.running.givers[datum]
        assert self.iterator_data is not None, f"nobody reads what the {datum} would come from"
        return self.iterator_data.giver(datum)

    def _has(self, datum: Datum) -> bool | None:
        self._take_arrivals()
        return True if datum in self.store else None

    def _take_arrivals(self) -> None:
        for datum, value, valid_from in self._machine.arrivals():
            self.store.arrive(datum, value, valid_from)

    def _norm(self, step: int) -> Datum:
        return Datum("norm", self.seat.stage, None, step)

    def _say_share(self, step: int, name: str, share: float) -> None:
        self._machine.send(
            Contribution(self._control_view.rank, step, name, {str(self.seat.stage): share}, self._shape.stages)
        )

    def _say_losses(self, step: int) -> None:
        losses = self.losses(step)
        if losses:
            self._machine.send(Contribution(self._control_view.rank, step, LOSS, losses, len(self._shape.batch)))
