"""A worker's training loop: run the program of each step, and recover when the membership changes.

Recovery: stop at the instruction boundary, plan for the survivors, report how many steps are applied here and what
this worker holds of unfinished ones; once everybody knows that of all, run what is left of them (core/lineage.py), and
go on with the new plan.  A worker whose last step stands in the way takes it back first.  Further failures while
this goes on just make another generation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable, Iterable, Protocol

from recycle_plugin import planner
from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.dataflow import Datum, pack, unpack
from recycle_plugin.core.executor import Interrupted
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.instruction import COMPUTE, Instruction
from recycle_plugin.core.lineage import surviving, unfinished
from recycle_plugin.core.plan import Plan, Policy
from recycle_plugin.core.protocol import Generation, Report, Resume, Stepped
from recycle_plugin.core.step import StepMachine
from recycle_plugin.core.topology import ClusterView, Topology
from recycle_plugin.runtime.errors import JobEnded
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.transport import Transport


@dataclass(frozen=True)
class Program:
    """What a worker runs of ``step``.  ``bare``, ``holder``: see core.lineage.Rest; nothing of them in a plan's own program."""

    step: int
    instructions: tuple[Instruction, ...]
    bare: frozenset[Instruction] = frozenset()
    holder: Seat | None = None
    resumed: bool = False


class Replica(Protocol):
    """What the loop asks of the framework's adapter."""

    def execute(self, program: Program) -> None:
        """Run it; raises Interrupted."""

    def held(self) -> Iterable[Datum]:
        """What this worker has of steps that are not committed, but parameters."""

    def undo(self, step: int) -> None:
        """Take ``step``, the last applied one, back."""


class Loop:
    """Of the worker at ``seat``.  ``reach(point)`` is where injected faults strike during recovery."""

    def __init__(
        self,
        session: Session,
        transport: Transport,
        topology: Topology,
        costs: CostModel,
        policy: Policy,
        seat: Seat,
        machine: StepMachine,
        reach: Callable[[str], None],
    ) -> None:
        self._session = session
        self._transport = transport
        self._topology = topology
        self._costs = costs
        self._policy = policy
        self._reach = reach
        self._plans: dict[frozenset[Seat], Plan] = {}
        self._rests: dict[int, Program] = {}  # of steps that a failure has interrupted
        self.seat = seat
        self.machine = machine
        self.plan: Plan | None = None

    def start(self, replica: Replica) -> None:
        """Wait for everybody and agree on the first plan."""
        self._session.wait("all workers to be ready", lambda: self._session.pending, interruptible=False)
        self.recover(replica)

    def advance(self, replica: Replica, step: int) -> None:
        """Return when ``step`` is applied here, and what peers need for it is done; it may be committed later."""
        while (coming := min([*self._rests, self.machine.stepped + 1])) <= step:
            try:
                self._change_at(replica, coming)
                replica.execute(self._rests.get(coming) or self._program(coming))
                self._rests.pop(coming, None)
            except Interrupted:
                self.recover(replica)

    def _program(self, step: int) -> Program:
        return Program(step, planner.lower(self.plan, self.seat, step))

    def applied(self, step: int) -> None:
        """The adapter has applied ``step``."""
        self.machine.applied(step)
        self._session.send(Stepped(self._session.rank, self._session.number, step))

    def settle(self, replica: Replica) -> None:
        """Return when all steps applied here are committed: only then may their effects be shown or saved."""
        step = self.machine.stepped
        while self.machine.committed < step:
            try:
                self.advance(replica, step)
                self._session.wait_committed(step)
                self.machine.commit(step)
            except Interrupted:
                self.recover(replica)

    def recover(self, replica: Replica) -> None:
        """Return when every member of the newest generation has agreed where to go on."""
        self._reach("recovery.start")
        while (generation := self._session.interruption()) is not None:
            self._enter(replica, generation)

    # --- membership changes ------------------------------------------------------------------------

    def _change_at(self, replica: Replica, step: int) -> None:
        """Enter a planned change, or the planned end, that holds from ``step`` on."""
        while True:
            end, planned = self._session.end, self._session.pending
            if end is not None and end.step and step >= end.step:
                self._session.wait_committed(step - 1)
                raise JobEnded(end.reason, end.failed)
            if planned is None or not planned.from_step or step < planned.from_step:
                return
            if self._session.rank not in {member.rank for member in planned.members}:
                self._session.wait_committed(step - 1)
                if self._session.pending is planned:
                    raise JobEnded("planned leave", failed=False)
            else:
                self._enter(replica, planned)

    def _enter(self, replica: Replica, generation: Generation) -> None:
        """Report for ``generation`` and adopt it, unless a newer one replaces it meanwhile."""
        stopped = time.time()
        plan = self._plan_for(generation)
        planned = time.time()
        self._reach("recovery.report")
        timings = {"notice_s": round(stopped - generation.at, 4), "plan_s": round(planned - stopped, 4)}
        held = pack({*replica.held(), Datum("params", self.seat.stage, None, self.machine.stepped + 1)})
        self._session.send(Report(self._session.rank, generation.number, self.machine.stepped, plan.digest, held, timings))
        resume = self._session.wait_resume(generation)
        if resume is None:
            return
        self._reach("recovery.resume")
        self._take_up(replica, plan, resume)
        self._transport.leave({member.address for member in generation.members})
        self._session.adopt(generation)
        if self.machine.stepped > self.machine.committed:
            self._session.send(Stepped(self._session.rank, generation.number, self.machine.stepped))
        self.plan = plan

    def _take_up(self, replica: Replica, plan: Plan, resume: Resume) -> None:
        """Work out what is left of the unfinished steps, and take the last one back where that is in the way."""
        started = time.time()
        held = {Seat.parse(seat): unpack(packed) for seat, packed in resume.held.items()}
        self._rests, undo, compute = {}, False, 0
        for rest in unfinished(plan, resume.committed, held):
            program = planner.arrange(rest, plan, self._costs, held)[self.seat]
            self._rests[rest.step] = Program(rest.step, program, rest.bare, rest.holders.get(self.seat.stage), resumed=True)
            undo |= self.seat in rest.undo
            compute += sum(one.op in COMPUTE for one in program)
            held = surviving(held, rest)
        self.machine.resume(resume.committed, undo)
        if undo:
            replica.undo(resume.committed + 1)
            self._reach("recovery.undone")
        if self._rests:
            also = " and the next" * (len(self._rests) > 1)
            self._session.note("rest", f"seat {self.seat} has {compute} instructions left to compute of step {min(self._rests)}{also}",
                               seat=str(self.seat), step=min(self._rests), compute=compute, undone=undo, work_out_s=round(time.time() - started, 4))

    def _plan_for(self, generation: Generation) -> Plan:
        live = frozenset(member.seat for member in generation.members)
        if live not in self._plans:
            self._plans[live] = planner.plan(ClusterView(self._topology, live), self._costs, self._policy)
        return self._plans[live]
