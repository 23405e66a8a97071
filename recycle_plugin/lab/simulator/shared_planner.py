"""The planner of all simulated workers of a cluster, as core.worker.training_loop.Planner."""

from __future__ import annotations

from recycle_plugin import planner
from recycle_plugin.core.messages.from_coordinator import Generation
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.recovery_plan import Held, RecoveryPlan
from recycle_plugin.core.vocabulary.step_batches import StepBatches
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.core.worker.loop_ports import Slowness


class SharedPlanner:
    """Plans and programs; a plan that several workers ask for is made once."""

    def __init__(self, costs: CostModel, policy: Policy) -> None:
        self._costs, self._policy = costs, policy
        self._plans: dict[tuple[frozenset[Seat], Slowness], Plan] = {}

    def plan(self, view: ClusterView, generation: Generation) -> Plan:
        """Return the plan for the live seats of ``view`` with the slowness in ``generation``. Raises PlanError."""
        case = view.live, generation.slowness
        if case not in self._plans:
            self._plans[case] = planner.plan(view, self._costs.slowed(generation.slowness), self._policy)
        return self._plans[case]

    def lowered(self, plan: Plan, seat: Seat, step: int) -> tuple[Instruction, ...]:
        """Return the program of ``seat`` in ``plan`` for ``step``."""
        return planner.lowered(plan, seat, step)

    def recover(
        self, plan: Plan, batches: StepBatches, step: int, held: Held, also_back: frozenset[Seat] = frozenset()
    ) -> RecoveryPlan:
        """Return what is left of ``step``."""
        return planner.recover(plan, self._costs, step, held, batches, also_back)
