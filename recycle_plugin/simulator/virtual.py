"""A world in virtual time: one process drives every seat through ``core.executor.execute``.

Data live where they were made or sent to; a seat waits until what ``requires`` names is there.  A
transfer takes ``costs.communication`` and occupies nobody.  REDUCE is a joint event of its stage's
live workers.  With a staggered optimizer nothing else joins seats; without it all seats reduce
together and start the next step together; VALIDATE joins all stages either way.

Seats yield what they wait for: an int (microseconds) or a ``Key``.  Ties in time are resolved in the
order in which they arose, so the same plan gives the same spans.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from itertools import count
from typing import Any, Iterator, NamedTuple

from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.dataflow import Datum, provides, requires
from recycle_plugin.core.executor import Span, execute
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.instruction import SENDS, Instruction, Op
from recycle_plugin.core.plan import Plan
from recycle_plugin.planner import lower


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
    """Runs ``steps`` steps of ``plan``, from ``step`` on.  ``spans`` is what happened, in order of ends."""

    def __init__(self, plan: Plan, costs: CostModel, steps: int = 1, step: int = 0) -> None:
        self.plan, self.costs, self.steps, self.first = plan, costs, range(step, step + steps), step
        self.spans: list[Span] = []
        self.store: dict[Seat, dict[Datum, Any]] = {seat: {} for seat in plan.programs}
        self._now, self._ticket = 0, count()
        self._agenda: list[tuple[int, int, Any]] = []  # (time, ticket, a seat's execution, or a delivery)
        self._waiting: defaultdict[Key, list[tuple[Seat, Iterator[Any]]]] = defaultdict(list)
        self._arrived: defaultdict[Joint, dict[Seat, Any]] = defaultdict(dict)

    def run(self) -> list[Span]:
        """Raises Deadlock."""
        for seat in self.store:
            self.store[seat][Datum("params", seat.stage, None, self.first)] = self.initial(seat)
            self._schedule(self._now, (seat, self._life(seat)))
        while self._agenda:
            self._now, _, entry = heappop(self._agenda)
            if isinstance(entry, _Delivery):
                self._keep(entry.seat, {entry.datum: entry.value})
            else:
                self._advance(*entry)
        if any(self._waiting.values()):
            waits = sorted((seat, key) for key, seats in self._waiting.items() for seat, _ in seats)
            raise Deadlock("; ".join(f"{seat} waits for {key if isinstance(key, Joint) else key[1]}" for seat, key in waits))
        return self.spans

    # What a world with values overrides.

    def initial(self, seat: Seat) -> Any:
        """The parameters that ``seat`` starts with."""

    def compute(self, seat: Seat, instruction: Instruction) -> dict[Datum, Any]:
        """What ``instruction`` makes, with its values."""
        return dict.fromkeys(provides(instruction))

    def contribute(self, seat: Seat, instruction: Instruction) -> Any:
        """What ``seat`` brings to a joint REDUCE."""

    # core.executor.World

    def check_generation(self) -> None:
        """Faults in virtual time are not simulated yet: the membership stays."""

    def now_us(self) -> int:
        return self._now

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[Key]:
        if instruction.op is Op.F and instruction.step > self.first and not self.plan.policy.stagger_optimizer:
            yield from self._await(Joint("STEP", None, instruction.step - 1))
        own = self.plan.own(seat) if instruction.op is Op.REDUCE else ()
        for datum in requires(instruction, self.plan.stages, own):
            if datum not in self.store[seat]:
                yield seat, datum
        if instruction.op in (Op.REDUCE, Op.VALIDATE):
            joint = self.joint(instruction)
            self._arrive(seat, joint, self.contribute(seat, instruction))
            yield from self._await(joint)

    def reach(self, when: str, seat: Seat, instruction: Instruction) -> None:
        """Where faults will strike."""

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[int]:
        spent = self.costs.of(instruction.op, seat.stage)
        if spent:
            yield spent
        if instruction.op in SENDS:
            (datum,) = requires(instruction, self.plan.stages)
            self._schedule(self._now + self.costs.communication, _Delivery(instruction.peer, datum, self.store[seat][datum]))
        self._keep(seat, self.compute(seat, instruction))
        if instruction.op is Op.STEP:
            self._end_step(seat, instruction.step)

    def record(self, span: Span) -> None:
        self.spans.append(span)

    # Joints

    def joint(self, instruction: Instruction) -> Joint:
        """Where ``instruction`` meets its peers: a stage's own, or all seats' where stages step together."""
        alone = instruction.op is Op.REDUCE and self.plan.policy.stagger_optimizer
        return Joint(instruction.op.name, instruction.stage if alone else None, instruction.step)

    def contributions(self, joint: Joint) -> dict[Seat, Any]:
        return self._arrived[joint]

    def _members(self, joint: Joint) -> int:
        return len(self.plan.programs) if joint.stage is None else len(self.plan.view.live_replicas(joint.stage))

    def _arrive(self, seat: Seat, joint: Joint, contribution: Any = None) -> None:
        self._arrived[joint][seat] = contribution
        if len(self._arrived[joint]) == self._members(joint):
            self._wake(joint)

    def _await(self, joint: Joint) -> Iterator[Key]:
        if len(self._arrived[joint]) < self._members(joint):
            yield joint

    def _end_step(self, seat: Seat, step: int) -> None:
        """Nothing of a step is of use after it but its parameters."""
        self.store[seat] = {datum: value for datum, value in self.store[seat].items() if datum.step > step}
        self._arrive(seat, Joint("STEP", None, step))

    # The clock

    def _life(self, seat: Seat) -> Iterator[Any]:
        for step in self.steps:
            yield from execute(seat, lower(self.plan, seat, step), self)

    def _schedule(self, at: int, entry: Any) -> None:
        heappush(self._agenda, (at, next(self._ticket), entry))

    def _advance(self, seat: Seat, execution: Iterator[Any]) -> None:
        wanted = next(execution, None)
        if isinstance(wanted, int):
            self._schedule(self._now + wanted, (seat, execution))
        elif wanted is not None:
            self._waiting[wanted].append((seat, execution))

    def _keep(self, seat: Seat, made: dict[Datum, Any]) -> None:
        for datum, value in made.items():
            self.store[seat][datum] = value
            self._wake((seat, datum))

    def _wake(self, key: Key) -> None:
        for waiting in self._waiting.pop(key, ()):
            self._schedule(self._now, waiting)


class _Delivery(NamedTuple):
    seat: Seat
    datum: Datum
    value: Any


def simulate(plan: Plan, costs: CostModel, steps: int = 1) -> list[Span]:
    """The spans of ``steps`` steps from rest, in microseconds.  Raises Deadlock."""
    return VirtualWorld(plan, costs, steps).run()
