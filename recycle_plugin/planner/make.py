"""Planning from end to end: route, flatten, schedule, assemble, verify."""

from __future__ import annotations

import time

from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.plan import Plan, Policy
from recycle_plugin.core.topology import ClusterView
from recycle_plugin.planner.assemble import assemble
from recycle_plugin.planner.bounds import bound
from recycle_plugin.planner.flat import Problem, flatten
from recycle_plugin.planner.one_f_one_b import fits, one_f_one_b
from recycle_plugin.planner.reroute import Routing, route
from recycle_plugin.planner.schedule import Solution, best_order, timed
from recycle_plugin.planner.search import fused, polish, search
from recycle_plugin.planner.verify import verify


TURNS = 3  # ways of dealing that ``refine`` tries


def plan(view: ClusterView, costs: CostModel, policy: Policy) -> Plan:
    """The verified schedule of one step for the live seats of ``view``.

    Without a failure and without a split backward that is DeepSpeed's own 1F1B, where the activation
    cap allows it.  Raises PlanError where there is no plan: a stage without a live worker, a loss
    with rerouting off, costs for another number of stages, memory for less than one micro-batch.
    """
    routing, problem = prepare(view, costs, policy)
    return finish(view, costs, policy, routing, problem, *solve(problem))


def refine(planned: Plan, costs: CostModel, budget_s: float, seed: int = 0) -> Plan:
    """A better plan for the same view and policy, or ``planned``; searches until the bound is met or ``budget_s`` seconds of CPU are spent.

    Also deals rerouted micro-batches out in other ways.  Because it goes by a clock, only one process may
    decide to use it, and has to hand the plan to the others.
    """
    until, best = time.thread_time() + budget_s, planned
    for turn in range(TURNS):
        routing = route(planned.view, planned.policy, costs, turn)
        problem = flatten(planned.view, costs, planned.policy, routing)
        solution, least = solve(problem)
        if best.period_us <= least:
            break
        solution = search(problem, solution, least, max(0.0, until - time.thread_time()) / (TURNS - turn), seed)
        if solution.period < best.period_us:
            best = finish(planned.view, costs, planned.policy, routing, problem, solution, least)
    return best


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


def solve(problem: Problem) -> tuple[Solution, int]:
    """The schedule that every worker finds, and the lower bound."""
    least = bound(problem)
    if not problem.split and fits(problem):
        return timed(problem, one_f_one_b(problem), least), least
    best = best_order(problem, least)
    best = best if best.period <= least else polish(problem, best, least)
    return (fused(problem, best, least) if problem.couple else best), least
