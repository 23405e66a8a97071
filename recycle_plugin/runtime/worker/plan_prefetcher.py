"""Makes plans for the likeliest next failures while training goes on.

A thread makes one plan after another, from the loss of any one worker to that of a whole host. The planner's inner
loops run without the interpreter's lock, and a failure does not wait for the thread. The plans are the same, to the
digest, as those made on demand, so workers may have prepared different ones.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

from recycle_plugin import planner
from recycle_plugin.core.messages.from_coordinator import Generation
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.recovery_plan import Held, RecoveryPlan
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.core.vocabulary.step_batches import StepBatches
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology

Hosts = list[list[Seat]]


class PlanPrefetcher:
    """Makes a worker's plans, ahead if it can. ``whole``: replicas are lost whole."""

    def __init__(self, costs: CostModel, policy: Policy, whole: bool = False) -> None:
        self.costs, self._policy = costs, policy
        self.store = planner.PlanStore(costs, policy, whole=whole)
        self._lock = threading.Lock()  # guards the store, for one plan at a time
        self._view: ClusterView | None = None

    def plan(self, view: ClusterView) -> Plan:
        """Return the plan for ``view``, that of ``planner.plan``; from the store if that is free. Raises PlanError."""
        if not self._lock.acquire(blocking=False):
            return planner.plan(view, self.costs, self._policy)
        try:
            return self.store.plan(view)
        finally:
            self._lock.release()

    def prepare(self, view: ClusterView, members: Iterable[Member]) -> None:
        """Begin to plan, on a thread, for what may happen to ``view``. Drops work for an older view."""
        self._view = view
        threading.Thread(
            target=self._work, args=(view, _hosts(members)), name="recycle: plan prefetcher", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop after the plan that is being made."""
        self._view = None

    def _work(self, view: ClusterView, hosts: Hosts) -> None:
        plans = self.store.prepare(view, hosts)
        while self._view is view:
            with self._lock:
                if next(plans, None) is None:
                    break


def _hosts(members: Iterable[Member]) -> Hosts:
    """Return the seats that die together."""
    found: dict[str, list[Seat]] = defaultdict(list)
    for member in members:
        found[member.host].append(member.seat)
    return [seats for seats in found.values() if len(seats) > 1]


class WorkerPlanner:
    """The planner of one worker's training loop, which also plans ahead. ``whole``: replicas are lost whole."""

    def __init__(self, costs: CostModel, policy: Policy, whole: bool) -> None:
        self._costs, self._policy = costs, policy
        self._whole, self._prefetcher = whole, PlanPrefetcher(costs, policy, whole)

    def full_us(self, topology: Topology) -> int:
        return planner.plan(topology.full(), self._costs, self._policy).period_us

    def plan(self, view: ClusterView, generation: Generation) -> Plan:
        """Return the plan for ``view``, at the slowness that ``generation`` adds. Also begin to plan for the next
        failure; the generation may be called off by then.
        """
        costs = self._costs.slowed(generation.slowness)
        if costs != self._prefetcher.costs:
            self._prefetcher.stop()
            self._prefetcher = PlanPrefetcher(costs, self._policy, self._whole)
        planned = self._prefetcher.plan(view)
        self._prefetcher.prepare(view, generation.roster)
        return planned

    def lowered(self, plan: Plan, seat: Seat, step: int) -> tuple[Instruction, ...]:
        return planner.lowered(plan, seat, step)

    def recover(
        self, plan: Plan, batches: StepBatches, step: int, held: Held, also_back: frozenset[Seat] = frozenset()
    ) -> RecoveryPlan:
        return planner.recover(plan, self._costs, step, held, batches, also_back)
