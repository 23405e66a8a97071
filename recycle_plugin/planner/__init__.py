"""From who is alive to who does what when: reroute, schedule, bound, verify, lower.

Every worker plans for itself and compares digests, so planning depends on nothing but its arguments.
"""

from __future__ import annotations

from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.plan import Plan, Policy
from recycle_plugin.core.topology import ClusterView
from recycle_plugin.planner.assemble import assemble
from recycle_plugin.planner.bounds import bound
from recycle_plugin.planner.errors import PlanError, VerificationError
from recycle_plugin.planner.flat import flatten
from recycle_plugin.planner.lower import lower
from recycle_plugin.planner.one_f_one_b import fits, one_f_one_b
from recycle_plugin.planner.reroute import route
from recycle_plugin.planner.schedule import best_order, replay
from recycle_plugin.planner.verify import verify

__all__ = ["PlanError", "VerificationError", "lower", "plan", "verify"]


def plan(view: ClusterView, costs: CostModel, policy: Policy) -> Plan:
    """The verified schedule of one step for the live seats of ``view``.

    Without a failure and without a split backward that is DeepSpeed's own 1F1B, where the activation
    cap allows it.  Raises PlanError where there is no plan: a stage without a live worker, a loss
    with rerouting off, costs for another number of stages.
    """
    routed = route(view, policy)
    problem = flatten(view, costs, policy, routed)
    if not (policy.split_backward or view.lost) and fits(problem):
        order = one_f_one_b(problem)
        timing = replay(problem, order)
    else:
        order, timing = best_order(problem)
    planned = assemble(view, costs, policy, routed, problem, order, timing, bound(problem))
    verify(planned)
    return planned
