"""A world in virtual time: one process drives every seat through core.worker.executor.execute.

Data is where it was made or sent to; a seat waits until what ``requires`` names is there. A transfer occupies no
worker. REDUCE joins its stage's live workers, TIE those of all stages that share
weights, VALIDATE all. Nothing else joins seats. Steps are applied by core/vocabulary/commit_rule.py.

A worker dies at a named instruction or at a given time, and never ends what it is at. Once that is detected, every
other worker stops at its next instruction boundary, or at once if it waits. lab/simulator/simulated_job.py goes on from
there with what survivors hold: until the commit, the maker keeps a boundary tensor, and every holder a stage's reduced
gradient.

Seats yield what they wait for: an int (microseconds) or a ``Key``. Ties in time are resolved in the order in which they
arose, so the same plan gives the same spans.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers, provides
from recycle_plugin.core.vocabulary.faults import FaultScript
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import RECEIVES, SENDS, Instruction, Op
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.executor import Interrupted, execute
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


@dataclass(frozen=True)
class Conditions:
    """The conditions around the workers; times in microseconds.

    ``commit_us``: from the last worker's step until all
    know it. ``detection_us``: from a death until all know it. ``scripts``: named faults, by seat. ``deaths``: when
    seats die. ``start_us``: the clock at the beginning. ``torn``: who has no result if a peer's death overlaps its
    REDUCE.
    """

    commit_us: int = 0
    detection_us: int = 0
    scripts: Mapping[Seat, FaultScript] = field(default_factory=dict)
    deaths: Mapping[Seat, int] = field(default_factory=dict)
    start_us: int = 0
    torn: Callable[[Seat, Instruction], bool] = lambda seat, instruction: False


@dataclass
class VirtualState:
    """The state that workers go on from: data, steps applied, and programs of steps that don't follow the plan's."""

    store: dict[Seat, StepStore]
    stepped: dict[Seat, int]
    recovery_plans: dict[int, Mapping[Seat, tuple[Instruction, ...]]] = field(default_factory=dict)

    @classmethod
    def fresh(cls, plan: Plan, step: int, parameters: Mapping[Seat, Any] | None) -> VirtualState:
        """Return the state before ``step``, with these parameters of each seat (None: no values)."""
        store = {
            seat: StepStore(seat, plan.stages, bool(plan.view.topology.tie(seat.stage)), committed=step - 1)
            for seat in plan.programs
        }
        for seat, value in (parameters or {}).items():
            store[seat].put(of_layers("params", seat, step), value)
        return cls(store, dict.fromkeys(plan.programs, step - 1))


class VirtualWorld:
    """A world in virtual time that runs ``steps`` steps of ``plan``, from ``step`` and ``state`` on. Afterwards:
    ``spans`` in order of ends; ``dead``: when seats died; ``interrupted_us``: when that was known (None: nobody died);
    ``stopped``: when each survivor then was at an instruction boundary.
    """

    def __init__(
        self,
        plan: Plan,
        costs: CostModel,
        steps: int = 1,
        step: int = 0,
        conditions: Conditions = Conditions(),
        state: VirtualState | None = None,
    ) -> None:
        self.plan, self.costs, self.steps, self.first, self.conditions = (
            plan,
            costs,
            range(step, step + steps),
            step,
            conditions,
        )
        self.spans: list[Span] = []
        self.state = state or VirtualState.fresh(plan, step, None)
        self.store = self.state.store
        self.machines = {seat: StepMachine(step - 1) for seat in plan.programs}
        self.commits: dict[int, int] = {}  # when all had applied each step
        self.dead: dict[Seat, int] = {}
        self.stopped: dict[Seat, int] = {}
        self.interrupted_us: int | None = None
        self._spent = {seat: {op: costs.of(op, seat.stage, seat) for op in Op} for seat in plan.programs}
        self._now, self._ticket = conditions.start_us, count()
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._lives: dict[Seat, Iterator[Any]] = {}
        self._waiting: defaultdict[Key, list[Seat]] = defaultdict(list)
        self._arrived: defaultdict[Joint, dict[Seat, Any]] = defaultdict(dict)
        self._open: set[Joint] = set()
        for seat, machine in self.machines.items():
            if self.state.stepped[seat] == step:
                machine.applied(step)
                self._arrived[Joint("COMMIT", None, step)][seat] = None

    def run(self) -> list[Span]:
        """Run all steps, or until a death is known; return the spans. Deadlock if nobody can go on."""
        for seat in self.store:
            self._lives[seat] = self._life(seat)
            self._schedule(self._now, partial(self._advance, seat))
        for seat, at in sorted(self.conditions.deaths.items()):
            if seat in self.store:
                self._schedule(max(at, self._now), partial(self._die, seat))
        with _uncollected():
            while self._agenda:
                self._now, _, happen = heappop(self._agenda)
                happen()
        if any(self._waiting.values()):
            waits = sorted((seat, key) for key, seats in self._waiting.items() for seat in seats)
            raise Deadlock(
                "; ".join(f"{seat} waits for {key if isinstance(key, Joint) else key[1]}" for seat, key in waits)
            )
        return self.spans

    def committed(self) -> int:
        """Return the last step that every survivor has applied, or the one before the first."""
        return min(
            (machine.stepped for seat, machine in self.machines.items() if seat not in self.dead),
            default=self.first - 1,
        )

    def survivors(self) -> VirtualState:
        """Return the state of the survivors; nobody has taken anything back yet."""
        live = [seat for seat in self.store if seat not in self.dead]
        return VirtualState(
            {seat: self.store[seat] for seat in live}, {seat: self.machines[seat].stepped for seat in live}
        )

    # What a world with values overrides.

    def compute(self, seat: Seat, instruction: Instruction) -> dict[Datum, Any]:
        """Return the data that ``instruction`` makes, with its values; a world with values overrides this."""
        return dict.fromkeys(provides(instruction))

    def contribute(self, seat: Seat, instruction: Instruction) -> Any:
        """Return what ``seat`` brings to a joint REDUCE or TIE; a world with values overrides this."""

    # core.worker.executor.InstructionRunner

    def check_generation(self) -> None:
        """Raise Interrupted if a death is known."""
        if self.interrupted_us is not None:
            raise Interrupted

    def now_us(self) -> int:
        """Return the virtual time in microseconds."""
        return self._now

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[Key]:
        """Yield what ``seat`` waits for before it can run ``instruction``."""
        op = instruction.op
        if op is Op.STEP and not self.machines[seat].may_apply(instruction.step):
            yield from self._await_commit(instruction.step - 1)
            self.machines[seat].commit(instruction.step - 1)
        for datum in self.store[seat].missing(instruction, self._own(seat, instruction)):
            yield seat, datum
        if op is Op.REDUCE or op is Op.TIE or op is Op.VALIDATE:
            joint = self.joint(instruction)
            self._arrive(seat, joint, self.contribute(seat, instruction))
            if joint not in self._open:
                yield joint

    def reach(self, when: str, seat: Seat, instruction: Instruction) -> None:
        """Kill ``seat`` if a fault is named for before or after ``instruction``."""
        if self.conditions.scripts:
            self._strike(when, seat, instruction)

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[int]:
        """Yield the microseconds that ``instruction`` takes, and carry it out."""
        op = instruction.op
        spent = self._spent[seat][op]
        if spent:
            yield spent
        if op is Op.REDUCE or op is Op.TIE:
            group = (seat.stage,) if op is Op.REDUCE else self._tie(seat.stage)
            if any(peer.stage in group for peer in self.dead) and self.conditions.torn(seat, instruction):
                raise Interrupted
        if op in SENDS:
            (datum,) = self.store[seat].requires(instruction)
            assert instruction.peer is not None, f"{instruction} goes to nobody"
            arrival = self._now + self.costs.transfer(seat, instruction.peer)
            self._schedule(arrival, partial(self._arrive_at, instruction.peer, datum, self.store[seat][datum]))
            return
        if op not in RECEIVES:
            made = self.compute(seat, instruction)
            self.store[seat].conclude(instruction, made)
            for datum in made:
                self._wake((seat, datum))
        if op is Op.STEP:
            self._end_step(seat, instruction.step)

    def record(self, span: Span) -> None:
        """Add the time span of an instruction that has run."""
        self.spans.append(span)

    def _own(self, seat: Seat, instruction: Instruction) -> tuple[MicroBatch, ...]:
        """Return the micro-batches that ``seat`` brings to a REDUCE: its plan's, or after a failure all that it has."""
        if instruction.op is not Op.REDUCE:
            return ()
        if instruction.step not in self.state.recovery_plans:
            return self.plan.own(seat)
        return self.store[seat].own(instruction)

    # Joints

    def _tie(self, stage: int) -> tuple[int, ...]:
        return self.plan.view.topology.tie(stage)

    def joint(self, instruction: Instruction) -> Joint:
        """Return the point that ``instruction`` reaches with its peers: of its stage, of its tie's first, or of all."""
        stage = {
            Op.REDUCE: instruction.stage,
            Op.TIE: min(self._tie(instruction.stage), default=None),
            Op.VALIDATE: None,
        }[instruction.op]
        return Joint(instruction.op.name, stage, instruction.step)

    def contributions(self, joint: Joint) -> dict[Seat, Any]:
        """Return what seats have brought to ``joint``, by seat."""
        return self._arrived[joint]

    def _arrive(self, seat: Seat, joint: Joint, contribution: Any = None, later_us: int = 0) -> None:
        """Record that a seat has arrived at a joint. The last one opens it, ``later_us`` later."""
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
            if later_us:
                self._schedule(self._now + later_us, partial(self._open_up, joint))
            else:
                self._open_up(joint)

    def _open_up(self, joint: Joint) -> None:
        self._open.add(joint)
        if joint.name == "COMMIT":
            self._drop(joint.step)
        self._wake(joint)

    def _drop(self, step: int) -> None:
        """Drop the data of a committed step, except its parameters."""
        for have in self.store.values():
            have.commit(step)

    def _await_commit(self, step: int) -> Iterator[Key]:
        joint = Joint("COMMIT", None, step)
        if joint not in self._open:
            yield joint

    def _end_step(self, seat: Seat, step: int) -> None:
        self.machines[seat].applied(step)
        joint = Joint("COMMIT", None, step)
        self._arrive(seat, joint, None, self.conditions.commit_us)
        if len(self._arrived[joint]) == len(self.store):
            self.commits[step] = self._now

    # Deaths

    def _strike(self, when: str, seat: Seat, instruction: Instruction) -> None:
        script = self.conditions.scripts.get(seat)
        fault = script.due(when, str(instruction)) if script is not None else None
        if fault is not None:
            if fault.kind != "kill":
                raise ValueError(f"{fault}: virtual time knows kills only")
            self._die(seat)
            raise _Died

    def _die(self, seat: Seat) -> None:
        if seat not in self.dead and seat not in self.stopped:
            self.dead[seat] = self._now
            for seats in self._waiting.values():
                if seat in seats:
                    seats.remove(seat)
            self._schedule(self._now + self.conditions.detection_us, self._interrupt)

    def _interrupt(self) -> None:
        if self.interrupted_us is None:
            self.interrupted_us = self._now
            for seats in self._waiting.values():
                self.stopped |= dict.fromkeys(seats, self._now)
            self._waiting.clear()

    # The clock

    def _life(self, seat: Seat) -> Iterator[Any]:
        for step in self.steps:
            recovery = self.state.recovery_plans.get(step)
            yield from execute(seat, lowered(self.plan, seat, step) if recovery is None else recovery[seat], self)

    def _schedule(self, at: int, happen: Callable[[], None]) -> None:
        heappush(self._agenda, (at, next(self._ticket), happen))

    def _advance(self, seat: Seat) -> None:
        if seat in self.dead:
            return
        try:
            wanted = next(self._lives[seat], None)
        except Interrupted:
            wanted = None
        except _Died:
            return
        if isinstance(wanted, int):
            self._schedule(self._now + wanted, partial(self._advance, seat))
        elif wanted is not None and self.interrupted_us is None:
            self._waiting[wanted].append(seat)
        else:
            self.stopped[seat] = self._now

    def _arrive_at(self, seat: Seat, datum: Datum, value: Any) -> None:
        self.store[seat].arrive(datum, value, self.store[seat].valid_from)
        self._wake((seat, datum))

    def _wake(self, key: Key) -> None:
        if key in self._waiting:
            for seat in self._waiting.pop(key):
                self._schedule(self._now, partial(self._advance, seat))


class _Died(Exception):
    """A worker is dead; raised in it to end its execution."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Return a context without the cyclic garbage collector, which would take a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def simulate(plan: Plan, costs: CostModel, steps: int = 1, conditions: Conditions = Conditions()) -> list[Span]:
    """Return the spans of ``steps`` steps from an empty pipeline, in microseconds. Raises Deadlock."""
    return VirtualWorld(plan, costs, steps, conditions=conditions).run()
