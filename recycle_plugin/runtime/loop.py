"""``core.loop`` in a real worker: waits block, so nothing is ever yielded."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Callable, Iterable, Iterator, Protocol

from recycle_plugin import planner
from recycle_plugin.core import loop as core
from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.instruction import Instruction
from recycle_plugin.core.lineage import Held, Rest
from recycle_plugin.core.plan import Plan, Policy
from recycle_plugin.core.protocol import Met
from recycle_plugin.core.sources import Standing
from recycle_plugin.core.step import StepMachine
from recycle_plugin.core.topology import ClusterView, Topology
from recycle_plugin.runtime.ahead import Ahead
from recycle_plugin.runtime.distance import Distance
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.transport import Transport


class Replica(Protocol):
    """What the framework's adapter does for the loop: ``core.loop.Replica``, blocking."""

    def execute(self, program: core.Program) -> None: ...

    def held(self) -> Iterable[Datum]: ...

    def drawn(self) -> dict[str, str]: ...

    def stand(self, standing: Standing) -> None: ...

    def undo(self, step: int) -> None: ...

    def judge(self, step: int, norm: float) -> None: ...

    def void(self, after: int, era: int) -> None: ...


class Loop:
    """Of the worker at ``seat``: every method returns when it is done.  ``reach(point)`` is where injected faults strike."""

    def __init__(
        self, session: Session, transport: Transport, replica: Replica, topology: Topology, costs: CostModel, policy: Policy,
        seat: Seat, machine: StepMachine, reach: Callable[[str], None], max_slowdown: float | None = None,
    ) -> None:  # fmt: skip
        port, self._session = _Port(session, reach), session
        self._planner = _Planner(costs, policy, session, max_slowdown)
        self._planner.resize(topology.full())
        self._loop = core.Loop(port, _Replica(replica, transport), self._planner, topology, seat, machine)
        self.machine = machine

    def start(self) -> None:
        _drain(self._loop.start())

    def train(self, step: int) -> dict:
        return _drain(self._loop.train(step))

    def advance(self, step: int) -> None:
        _drain(self._loop.advance(step))

    def applied(self, step: int) -> None:
        self._loop.applied(step)

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


class _Port:
    def __init__(self, session: Session, reach: Callable[[str], None]) -> None:
        self.line = self._session = session
        self.reach = reach
        self.send = session.send
        self.clock = time.time

    def wait(self, what: Any, ready: Callable[[], Any], interruptible: bool = True) -> Iterator[Any]:
        return self._session.wait(what, ready, interruptible)
        yield  # a generator, as the loop wants it, that never yields


class _Replica:
    def __init__(self, replica: Replica, transport: Transport) -> None:
        self._replica = replica
        self.held, self.drawn, self.stand, self.undo, self.leave = replica.held, replica.drawn, replica.stand, replica.undo, transport.leave
        self.judge, self.void = replica.judge, replica.void

    def execute(self, program: core.Program) -> Iterator[Any]:
        self._replica.execute(program)
        return iter(())


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

    def lower(self, plan: Plan, seat: Seat, step: int) -> tuple[Instruction, ...]:
        return planner.lower(plan, seat, step)

    def arrange(self, rest: Rest, plan: Plan, held: Held) -> planner.rest.Programs:
        return planner.arrange(rest, plan, self._costs, held)


def _drain(execution: Iterator[Any]) -> Any:
    """The value of a generator whose waits block."""
    try:
        next(execution)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a wait of a real worker has yielded instead of blocking")
