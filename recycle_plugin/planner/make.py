"""Planning from end to end: route, flatten, schedule, assemble, verify."""

from __future__ import annotations

from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.plan import Plan, Policy
from recycle_plugin.core.topology import ClusterView, Topology
from recycle_plugin.planner.assemble import assemble
from recycle_plugin.planner.bounds import bound
from recycle_plugin.planner.flat import Problem, flatten
from recycle_plugin.planner.one_f_one_b import fits, one_f_one_b
from recycle_plugin.planner.reroute import Routing, route
from recycle_plugin.planner.schedule import Solution, best_order, timed
from recycle_plugin.planner.search import polish, search
from recycle_plugin.planner.verify import verify


def plan(view: ClusterView, costs: CostModel, policy: Policy) -> Plan:
    """The verified schedule of one step for the live seats of ``view``.

    Without a failure and without a split backward that is DeepSpeed's own 1F1B, where the activation
    cap allows it.  Raises PlanError where there is no plan: a stage without a live worker, a loss
    with rerouting off, costs for another number of stages, memory for less than one micro-batch.
    """
    routing, problem = prepare(view, costs, policy)
    least = bound(problem)
    return finish(view, costs, policy, routing, problem, _solve(problem, view, least), least)


def refine(planned: Plan, costs: CostModel, budget_s: float, seed: int = 0) -> Plan:
    """A better plan for the same view and policy, or ``planned``; searches until the bound is met or the time is up.

    Because it goes by a clock, only one process may decide to use it and has to hand the plan to the others.
    """
    routing, problem = prepare(planned.view, costs, planned.policy)
    least = bound(problem)
    found = search(problem, _solve(problem, planned.view, least), least, budget_s, seed)
    if found.period >= planned.period_us:
        return planned
    return finish(planned.view, costs, planned.policy, routing, problem, found, least)


def prepare(view: ClusterView, costs: CostModel, policy: Policy) -> tuple[Routing, Problem]:
    """The problem to be scheduled.  Raises PlanError."""
    routing = route(view, policy, costs)
    return routing, flatten(view, costs, policy, routing)


def finish(
    view: ClusterView, costs: CostModel, policy: Policy, routing: Routing, problem: Problem, solution: Solution, least: int
) -> Plan:
    """The verified plan of a solution."""
    planned = assemble(view, costs, policy, routing.named(view), problem, solution, least)
    verify(planned, costs)
    return planned


def warm() -> None:
    """Compile, or load from the disk cache, every compiled loop: so that no failure has to wait for it.

    Takes some tenths of a second from the cache, and many seconds on a machine's very first call.
    """
    view = Topology(2, 2, 2).full().without(Seat(0, 1))
    for policy in (Policy(), Policy(stagger_optimizer=False)):
        _ = plan(view, CostModel.uniform(2, communication=1), policy).digest


def _solve(problem: Problem, view: ClusterView, least: int) -> Solution:
    if not (problem.split or view.lost) and fits(problem):
        return timed(problem, one_f_one_b(problem), least)
    best = best_order(problem, least)
    return best if best.period <= least else polish(problem, best, least)
