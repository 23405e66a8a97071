"""A world in virtual time without failures: one process drives every seat through ``core.worker.executor.execute``.

Data live where they were made or sent to; a seat waits until what ``requires`` names is there.  A transfer occupies no
worker, and takes ``costs.transfer``.  REDUCE is a joint event of its stage's live workers, TIE of those of all stages
that share weights, VALIDATE of all.  Nothing else joins seats.  Steps are applied by the commit rule of
``core.vocabulary.commit_rule``.

Seats yield what they wait for: an int (microseconds) or a ``Key``.  Ties in time are resolved in the order in which
they arose, so the same plan gives the same spans.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers, provides
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import RECEIVES, SENDS, Instruction, Op
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.executor import execute
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.planner import lowered


class Deadlock(Exception):
    """Nobody can go on; the message says what each seat waits for."""


class Joint(NamedTuple):
    """A point that several seats reach together: ``name`` of ``stage`` (None: of all stages) in ``step``."""

    name: str
    stage: int | None
    step: int

    def __str__(self) -> str:
        return f"{self.name} of {'all stages' if self.stage is None else f'stage {self.stage}'}, step {self.step}"


Key = tuple[Seat, Datum] | Joint


class VirtualWorld:
    """A world in virtual time that runs ``steps`` steps of ``plan``, from ``step`` on, with these ``parameters`` of
    each seat before it (None: no values).

    Afterwards: ``spans``, what happened, in order of ends.
    """

    def __init__(
        self,
        plan: Plan,
        costs: CostModel,
        steps: int = 1,
        step: int = 0,
        parameters: Mapping[Seat, Any] | None = None,
    ) -> None:
        self.plan, self.costs, self.steps = plan, costs, range(step, step + steps)
        self.spans: list[Span] = []
        self.store = {
            seat: StepStore(seat, plan.stages, bool(self._tie(seat.stage)), committed=step - 1)
            for seat in plan.programs
        }
        for seat, value in (parameters or {}).items():
            self.store[seat].put(of_layers("params", seat, step), value)
        self._machines = {seat: StepMachine(step - 1) for seat in plan.programs}
        self._spent = {seat: {op: costs.of(op, seat.stage, seat) for op in Op} for seat in plan.programs}
        self._now, self._ticket = 0, count()
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._lives: dict[Seat, Iterator[Any]] = {}
        self._waiting: defaultdict[Key, list[Seat]] = defaultdict(list)
        self._arrived: defaultdict[Joint, dict[Seat, Any]] = defaultdict(dict)
        self._open: set[Joint] = set()

    def run(self) -> list[Span]:
        """Run all steps; return the spans.  Raises Deadlock if nobody can go on."""
        for seat in self.store:
            self._lives[seat] = self._life(seat)
            self._schedule(self._now, partial(self._advance, seat))
        with _uncollected():
            while self._agenda:
                self._now, _, happen = heappop(self._agenda)
                happen()
        if self._waiting:
            waits = sorted((seat, key) for key, seats in self._waiting.items() for seat in seats)
            raise Deadlock(
                "; ".join(f"{seat} waits for {key if isinstance(key, Joint) else key[1]}" for seat, key in waits)
            )
        return self.spans

    # What a world with values overrides.

    def compute(self, seat: Seat, instruction: Instruction) -> dict[Datum, Any]:
        """The data that ``instruction`` makes, with its values; a world with values overrides this."""
        return dict.fromkeys(provides(instruction))

    def contribute(self, seat: Seat, instruction: Instruction) -> Any:
        """The value that ``seat`` brings to a joint REDUCE or TIE; a world with values overrides this."""

    # core.worker.executor.InstructionRunner

    def check_generation(self) -> None:
        """Nothing: the membership stays as it is."""

    def now_us(self) -> int:
        """The virtual time in microseconds."""
        return self._now

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[Key]:
        """Yields what ``seat`` waits for before it can run ``instruction``."""
        op = instruction.op
        if op is Op.STEP and not self._machines[seat].may_apply(instruction.step):
            yield from self._await_commit(instruction.step - 1)
            self._machines[seat].commit(instruction.step - 1)
        for datum in self.store[seat].missing(instruction, self._own(seat, instruction)):
            yield seat, datum
        if op is Op.REDUCE or op is Op.TIE or op is Op.VALIDATE:
            joint = self.joint(instruction)
            self._arrive(seat, joint, self.contribute(seat, instruction))
            if joint not in self._open:
                yield joint

    def reach(self, when: str, seat: Seat, instruction: Instruction) -> None:
        """Nothing: no faults strike."""

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[int]:
        """Yields the microseconds that ``instruction`` takes, and does what it does."""
        op = instruction.op
        spent = self._spent[seat][op]
        if spent:
            yield spent
        if op in SENDS:
            (datum,) = self.store[seat].requires(instruction)
            peer = instruction.peer
            assert peer is not None, f"{instruction} goes to nobody"
            arrival = self._now + self.costs.transfer(seat, peer)
            self._schedule(arrival, partial(self._arrive_at, peer, datum, self.store[seat][datum]))
            return
        if op not in RECEIVES:
            made = self.compute(seat, instruction)
            self.store[seat].conclude(instruction, made)
            for datum in made:
                self._wake((seat, datum))
        if op is Op.STEP:
            self._machines[seat].applied(instruction.step)
            self._arrive(seat, Joint("COMMIT", None, instruction.step))

    def record(self, span: Span) -> None:
        """Takes the time span of an instruction that has run."""
        self.spans.append(span)

    def _own(self, seat: Seat, instruction: Instruction) -> tuple[MicroBatch, ...]:
        """The micro-batches whose weight gradients ``seat`` brings to a REDUCE."""
        return self.plan.own(seat) if instruction.op is Op.REDUCE else ()

    # Joints

    def _tie(self, stage: int) -> tuple[int, ...]:
        return self.plan.view.topology.tie(stage)

    def joint(self, instruction: Instruction) -> Joint:
        """The point that ``instruction`` reaches together with its peers: a stage's own, a tie's (under its first
        stage), or all seats'.
        """
        stage = {
            Op.REDUCE: instruction.stage,
            Op.TIE: min(self._tie(instruction.stage), default=None),
            Op.VALIDATE: None,
        }[instruction.op]
        return Joint(instruction.op.name, stage, instruction.step)

    def contributions(self, joint: Joint) -> dict[Seat, Any]:
        """The values that seats have brought to ``joint``, by seat."""
        return self._arrived[joint]

    def _arrive(self, seat: Seat, joint: Joint, contribution: Any = None) -> None:
        """Notes that a seat has arrived at a joint.  The last one to arrive opens it."""
        self._arrived[joint][seat] = contribution
        group = (
            range(self.plan.stages)
            if joint.stage is None
            else self._tie(joint.stage)
            if joint.name == "TIE"
            else (joint.stage,)
        )
        everybody = sum(len(self.plan.view.live_replicas(stage)) for stage in group)
        if len(self._arrived[joint]) == everybody:
            self._open_up(joint)

    def _open_up(self, joint: Joint) -> None:
        self._open.add(joint)
        if joint.name == "COMMIT":
            for have in self.store.values():  # nothing of the step is of use any more but its parameters
                have.commit(joint.step)
        self._wake(joint)

    def _await_commit(self, step: int) -> Iterator[Key]:
        joint = Joint("COMMIT", None, step)
        if joint not in self._open:
            yield joint

    # The clock

    def _life(self, seat: Seat) -> Iterator[Any]:
        for step in self.steps:
            yield from execute(seat, lowered(self.plan, seat, step), self)

    def _schedule(self, at: int, happen: Callable[[], None]) -> None:
        heappush(self._agenda, (at, next(self._ticket), happen))

    def _advance(self, seat: Seat) -> None:
        wanted = next(self._lives[seat], None)
        if isinstance(wanted, int):
            self._schedule(self._now + wanted, partial(self._advance, seat))
        elif wanted is not None:
            self._waiting[wanted].append(seat)

    def _arrive_at(self, seat: Seat, datum: Datum, value: Any) -> None:
        self.store[seat].arrive(datum, value, self.store[seat].valid_from)
        self._wake((seat, datum))

    def _wake(self, key: Key) -> None:
        for seat in self._waiting.pop(key, ()):
            self._schedule(self._now, partial(self._advance, seat))


@contextmanager
def _uncollected() -> Iterator[None]:
    """A context without the cyclic garbage collector: it walks all the data of the run over and over, a third of the
    time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def simulate(plan: Plan, costs: CostModel, steps: int = 1) -> list[Span]:
    """The spans of ``steps`` steps from an empty pipeline, in microseconds.  Raises Deadlock."""
    return VirtualWorld(plan, costs, steps).run()
