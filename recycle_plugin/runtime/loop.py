"""``core.loop`` in a real worker: waits block, so nothing is ever yielded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterator

from recycle_plugin import planner
from recycle_plugin.core import loop as core
from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.instruction import Instruction
from recycle_plugin.core.lineage import Held, Rest
from recycle_plugin.core.plan import Plan, Policy
from recycle_plugin.core.protocol import Met
from recycle_plugin.core.step import StepMachine
from recycle_plugin.core.topology import ClusterView, Topology
from recycle_plugin.core.worker import Worker
from recycle_plugin.runtime.ahead import Ahead
from recycle_plugin.runtime.distance import Distance
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.world import TorchMachine


class Loop:
    """Of ``worker``, on ``world``: every method returns when it is done."""

    def __init__(
        self, session: Session, worker: Worker, world: TorchMachine, topology: Topology, costs: CostModel, policy: Policy,
        machine: StepMachine, max_slowdown: float | None = None,
    ) -> None:  # fmt: skip
        self._session, self._worker = session, worker
        self._planner = _Planner(costs, policy, session, max_slowdown)
        self._planner.resize(topology.full())
        self._loop = core.Loop(world, worker, self._planner, topology, worker.seat, machine)
        worker.applied = self._loop.applied
        self.machine = machine

    def execute(self, program: core.Program) -> None:
        """Outside the training loop: an evaluation's."""
        _drain(self._worker.execute(program))

    def fetch(self, datum: Datum, source: Seat) -> Any:
        """What ``source`` sends, once it is here."""
        return _drain(self._worker.fetch(datum, source))

    def start(self) -> None:
        _drain(self._loop.start())

    def train(self, step: int) -> dict:
        return _drain(self._loop.train(step))

    def advance(self, step: int) -> None:
        _drain(self._loop.advance(step))

    @property
    def settled(self) -> bool:
        """Whether all steps applied here are known to be committed."""
        return max(self.machine.committed, self._session.committed) >= self.machine.stepped

    def settle(self) -> None:
        """Where all are committed nothing is waited for, not even what has happened since."""
        if self.settled:
            self.machine.commit(self.machine.stepped)
        else:
            _drain(self._loop.settle())

    def recover(self) -> None:
        _drain(self._loop.recover())

    @property
    def plan(self) -> Plan:
        return self._loop.plan

    def meet(self, place: str, values: dict) -> Met:
        return _drain(self._loop.meet(place, values))

    def loaded(self, step: int) -> None:
        _drain(self._loop.loaded(step))

    def resize(self, topology: Topology, batch: int) -> None:
        self._planner.resize(topology.full())
        _drain(self._loop.resize(topology, batch, self._planner.full_us(topology)))


class _Planner:
    def __init__(self, costs: CostModel, policy: Policy, session: Session, max_slowdown: float | None) -> None:
        self._costs, self._policy, self._session, self._max_slowdown = costs, policy, session, max_slowdown
        self._distance: Distance | None = None
        self._ahead = Ahead(costs, policy)

    def resize(self, full: ClusterView) -> None:
        """``full``: everybody there, and the number of micro-batches from now on."""
        if self._max_slowdown is not None:
            self._distance = Distance(self._session, full, self._costs, self._policy, self._max_slowdown)

    def full_us(self, topology: Topology) -> int:
        return planner.plan(topology.full(), self._costs, self._policy).period_us

    def plan(self, view: ClusterView, slowness: core.Slowness) -> Plan:
        """``slowness`` is what has been measured, beside what was known before.

        Also begins to plan for what may come next; members are those of the generation that is being entered.
        """
        costs = replace(self._costs, slowness=tuple(sorted({**dict(self._costs.slowness), **dict(slowness)}.items())))
        if costs != self._ahead.costs:
            self._ahead.stop()
            self._ahead = Ahead(costs, self._policy)
        planned = self._ahead.plan(view)
        entered = self._session.pending or self._session.generation
        self._ahead.prepare(view, entered.roster)
        if self._distance is not None and self._session.worker == entered.roster.first.worker:
            self._distance.say(view, costs)
        return planned

    def lowered(self, plan: Plan, seat: Seat, step: int) -> tuple[Instruction, ...]:
        return planner.lowered(plan, seat, step)

    def arrange(self, rest: Rest, plan: Plan, held: Held) -> planner.rest.Programs:
        return planner.arrange(rest, plan, self._costs, held)


def _drain(execution: Iterator[Any]) -> Any:
    """The value of a generator whose waits block."""
    try:
        next(execution)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a wait of a real worker has yielded instead of blocking")
