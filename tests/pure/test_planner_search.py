"""The local search: moves against timing from scratch, tensors on their way; and the oracle that finds optima."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.planner import plan
from recycle_plugin.planner.climb import climb, measure
from recycle_plugin.planner.make import prepare, solve
from recycle_plugin.planner.moves import opened
from recycle_plugin.planner.search import net
from tests.support.cp_sat import exact
from tests.support.small_jobs import small_case

IMPROVABLE = Topology(1, 3, 3).full(), CostModel((3,) * 3, (2, 1, 2), (3,) * 3, step=(1,) * 3), Policy(activation_cap=4)


@pytest.mark.parametrize("seed", range(25))
def test_what_a_climb_measures_move_by_move_is_what_the_order_takes(seed: int) -> None:
    """Of the order that it leaves, timed from scratch; which also keeps memory, dependencies and blocks."""
    view, costs, policy = small_case(Random(seed), 300)
    problem = prepare(view, costs, replace(policy, block=(1, 2, None)[seed % 3]))
    solution, _ = solve(problem)
    graph = net(problem, np.zeros(problem.stages, np.int64), problem.closing)
    order, who = solution.order[np.argsort(solution.starts, kind="stable")], np.tile(problem.worker, 4)
    before = opened(graph, order.copy(), who)
    found = climb(graph, order, who, 0, 1000, 2, seed)
    windows = np.empty((2, problem.stages), np.int64)
    assert found == measure(graph, opened(graph, order.copy(), who), 0, *windows)
    assert found <= measure(graph, before, 0, *windows)
    held, done = np.zeros(problem.workers, np.int64), set()
    for operation in order.tolist():
        held[who[operation]] += graph.change[operation]
        assert held[who[operation]] <= graph.cap[who[operation]]
        assert {
            int(graph.source[operation]),
            int(graph.ahead[operation]),
        } <= done | {-1}
        done.add(operation)
    assert done == set(solution.order.tolist()) and not held.any()


@pytest.mark.parametrize("way_ms", [1, 2, 4, 8])
def test_tensors_on_their_way_cost_no_more_than_their_trips(way_ms: int) -> None:
    """Twelve trips on the longest path: two round trips over four stages."""
    costs = CostModel.uniform(4, 33, 33, 33)
    view, policy = Topology(2, 4, 8).full(), Policy(activation_cap=4)
    at_once = plan(view, costs, policy).period_us
    assert plan(view, replace(costs, communication=way_ms), policy).period_us <= at_once + 12 * way_ms


def test_the_oracle_ends_at_the_optimum() -> None:
    pytest.importorskip("ortools")
    view, costs, policy = IMPROVABLE
    problem = prepare(view, costs, policy)
    solution, _ = solve(problem)
    assert solution.period == 29
    assert exact(problem, solution, 20.0, use_bound=True).period == 28


@pytest.mark.parametrize(
    "policy",
    (Policy(activation_cap="1f1b"), Policy(activation_cap="1f1b", stagger_optimizer=False)),
    ids=("staggered", "together"),
)
def test_an_exact_schedule_with_gradients_that_take_no_time_keeps_the_bound(policy) -> None:
    """Some then start together that need each other: 26, by an order that nobody can run."""
    pytest.importorskip("ortools")
    costs = CostModel((4, 4, 4), (2, 4, 0), (6, 3, 3), reduce=(3, 3, 3), step=(3, 3, 3))
    problem = prepare(Topology(1, 3, 1, ((0, 2),)).full(), costs, policy)
    solution, least = solve(problem)
    assert exact(problem, solution, 5.0).period == solution.period == least == 30


@pytest.mark.parametrize("block", (2, None))
def test_an_optimum_with_blocks_is_no_shorter_than_the_bound_without(block) -> None:
    pytest.importorskip("ortools")
    view, costs = Topology(3, 2, 4).full().without(Seat(0, 1)), CostModel((3, 4), (4, 2), (3, 5), 1)
    policy = Policy(activation_cap=5, block=block)
    problem = prepare(view, costs, policy)
    solution, _ = solve(problem)
    best = exact(problem, solution, 3.0, use_bound=True)
    assert plan(view, costs, replace(policy, block=1)).bound_us <= best.period <= solution.period
