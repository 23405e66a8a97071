"""Planning from end to end: route, flatten, schedule, assemble, verify."""

from __future__ import annotations

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.planner.assemble import assemble
from recycle_plugin.planner.bounds import bound
from recycle_plugin.planner.flat import Problem, flatten
from recycle_plugin.planner.list_scheduling import Solution, best_order, timed
from recycle_plugin.planner.one_f_one_b import fits, one_f_one_b
from recycle_plugin.planner.reroute import route
from recycle_plugin.planner.search import polish
from recycle_plugin.planner.shrunk import shrunk
from recycle_plugin.planner.verify import verify


def plan(view: ClusterView, costs: CostModel, policy: Policy) -> Plan:
    """Return the verified schedule of one step for the live seats of ``view``.

    Without a failure and without a split backward it is DeepSpeed's own 1F1B, if the activation cap allows that. Raises
    PlanError if there is no plan: a stage without a live worker, a loss with rerouting off, costs for another number of
    stages, memory for less than one micro-batch.
    """
    if policy.shrinks and view.lost:
        return shrunk(view, costs, policy, plan)
    problem = prepare(view, costs, policy)
    return finish(view, costs, policy, problem, *solve(problem))


def prepare(view: ClusterView, costs: CostModel, policy: Policy) -> Problem:
    """Return the routed scheduling problem for the live seats of ``view``. Raises PlanError as :func:`plan` does."""
    return flatten(view, costs, policy, route(view, policy, costs))


def finish(
    view: ClusterView, costs: CostModel, policy: Policy, problem: Problem, solution: Solution, least: int
) -> Plan:
    """Return the verified plan of a solution. Raises VerificationError if it breaks a rule: the planner's mistake."""
    planned = assemble(view, costs, policy, problem, solution, least)
    verify(planned)
    return planned


def solve(problem: Problem) -> tuple[Solution, int]:
    """Return the schedule that every worker finds, and the lower bound in microseconds."""
    least = bound(problem)
    if not problem.split and fits(problem):
        return timed(problem, one_f_one_b(problem), least), least
    best = best_order(problem, least)
    return best if best.period <= least else polish(problem, best, least), least
