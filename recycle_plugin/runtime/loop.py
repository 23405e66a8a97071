"""A worker's training loop: run the program of each step, and recover when the membership changes.

Recovery: stop at the instruction boundary, drop the unfinished step, plan for the survivors, report
how many steps are applied here, and go on from where the coordinator says; whoever is one step
ahead takes its step back first.  Further failures while this goes on just make another generation.
"""

from __future__ import annotations

import time
from typing import Callable, Protocol

from recycle_plugin import planner
from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.executor import Interrupted
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.plan import Plan, Policy
from recycle_plugin.core.protocol import Generation, Report, Stepped
from recycle_plugin.core.step import StepMachine
from recycle_plugin.core.topology import ClusterView, Topology
from recycle_plugin.runtime.errors import JobEnded
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.transport import Transport


class Replica(Protocol):
    """What the loop asks of the framework's adapter."""

    def execute(self, plan: Plan, step: int) -> None:
        """Run this seat's program of ``step``; raises Interrupted."""

    def discard(self) -> None:
        """Drop the unfinished step: stashes, gradients, received tensors."""

    def undo(self) -> None:
        """Take the last applied step back, exactly."""


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
        self.seat = seat
        self.machine = machine
        self.plan: Plan | None = None

    def start(self, replica: Replica) -> None:
        """Wait for everybody and agree on the first plan."""
        self._session.wait("all workers to be ready", lambda: self._session.pending, interruptible=False)
        self.recover(replica)

    def advance(self, replica: Replica, step: int) -> None:
        """Return when ``step`` is applied here; it may be committed later."""
        while self.machine.stepped < step:
            try:
                self._change_at(replica, self.machine.stepped + 1)
                replica.execute(self.plan, self.machine.stepped + 1)
            except Interrupted:
                self.recover(replica)

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
            replica.discard()
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
        self._session.send(Report(self._session.rank, generation.number, self.machine.stepped, plan.digest, timings))
        resume = self._session.wait_resume(generation)
        if resume is None:
            return
        self._reach("recovery.resume")
        if self.machine.resume(resume.committed):
            replica.undo()
            self._reach("recovery.undone")
        self._transport.forget(generation.number, {member.address for member in generation.members})
        self._session.adopt(generation)
        self.plan = plan

    def _plan_for(self, generation: Generation) -> Plan:
        live = frozenset(member.seat for member in generation.members)
        if live not in self._plans:
            self._plans[live] = planner.plan(ClusterView(self._topology, live), self._costs, self._policy)
        return self._plans[live]
