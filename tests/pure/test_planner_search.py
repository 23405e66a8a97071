"""The search beyond plain plans: moves against timing from scratch, dealing rerouted micro-batches anew, the exact
stage, tensors on their way.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.planner.benchmark import small_case
from recycle_plugin.lab.planner.cp_sat import exact, refined_exactly
from recycle_plugin.planner import PlanError, plan, refine
from recycle_plugin.planner.climb import climb, measure
from recycle_plugin.planner.make import prepare, solve
from recycle_plugin.planner.moves import opened
from recycle_plugin.planner.search import climbed, net
from tests.support.planned import UNIT

IMPROVABLE = Topology(1, 3, 3).full(), CostModel((3,) * 3, (2, 1, 2), (3,) * 3, step=(1,) * 3), Policy(activation_cap=4)


@pytest.mark.parametrize("deal", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_what_a_climb_measures_move_by_move_is_what_the_order_takes(seed: int, deal: bool) -> None:
    """Of the order that it leaves, timed from scratch; which also keeps memory, dependencies and blocks."""
    view, costs, policy = small_case(Random(seed), 300)
    problem = prepare(
        view, costs, replace(policy, couple=policy.split_backward and seed % 3 == 0, block=(1, 2, None)[seed % 3])
    )
    solution, _ = solve(problem)
    graph = net(problem, solution.order, np.zeros(problem.stages, np.int64), problem.closing, deal)
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
    assert (who[: problem.records][graph.mate] == who[: problem.records]).all()


@pytest.mark.parametrize("block", (1, 4))
def test_only_rerouted_micro_batches_change_their_worker_and_only_to_peers(block: int) -> None:
    view = Topology(8, 2, 16).full().without(*(Seat(replica, 1 - replica % 2) for replica in range(6)))
    problem = prepare(view, CostModel.uniform(2), Policy(activation_cap=3, block=block))
    solution, least = solve(problem)
    others = [climbed(problem, solution, least, 3000, 2, seed, deal=True)[0] for seed in range(4)]
    assert any((other.worker != problem.worker).any() for other in others)
    home = np.arange(problem.records) // problem.micro_batches
    for other in others:
        stayed = problem.worker == home
        assert (other.worker[stayed] == home[stayed]).all() and problem.live[other.worker].all()
        assert (other.worker // problem.ranks == np.arange(problem.records) // problem.width).all()
        assert (other.worker.reshape(-1, block) == other.worker.reshape(-1, block)[:, :1]).all(), "blocks stay whole"
        assert other.loads.tolist() == np.bincount(other.worker, minlength=problem.workers).tolist()


def test_routes_stay_where_workers_or_links_differ() -> None:
    view, alike = Topology(3, 2, 4).full().without(Seat(0, 1)), CostModel.uniform(2, communication=3)
    assert prepare(view, alike, Policy()).alike
    assert not prepare(view, replace(alike, communication_across=4), Policy()).alike
    assert not prepare(view, replace(alike, slowness=((Seat(1, 1), 150),)), Policy()).alike


@pytest.mark.parametrize("way_ms", [1, 2, 4, 8])
def test_tensors_on_their_way_cost_no_more_than_their_trips(way_ms: int) -> None:
    """Twelve trips on the longest path: two round trips over four stages."""
    costs = CostModel.uniform(4, 33, 33, 33)
    view, policy = Topology(2, 4, 8).full(), Policy(activation_cap=4)
    at_once = plan(view, costs, policy).period_us
    assert plan(view, replace(costs, communication=way_ms), policy).period_us <= at_once + 12 * way_ms


def test_the_exact_stage_ends_at_the_optimum() -> None:
    pytest.importorskip("ortools")
    view, costs, policy = IMPROVABLE
    planned = plan(view, costs, policy)
    assert planned.period_us == 29
    assert refined_exactly(planned, costs, 20.0).period_us == 28


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
def test_refined_and_exact_plans_keep_blocks(block) -> None:
    """The verifier looks; and blocks can't make the optimum shorter."""
    pytest.importorskip("ortools")
    view, costs = Topology(3, 2, 4).full().without(Seat(0, 1)), CostModel((3, 4), (4, 2), (3, 5), 1)
    policy = Policy(activation_cap=5, block=block)
    planned, free = plan(view, costs, policy), plan(view, costs, replace(policy, block=1))
    searched, best = refine(planned, costs, 0.3), refined_exactly(planned, costs, 3.0)
    assert best.period_us <= planned.period_us and searched.period_us <= planned.period_us
    assert free.bound_us <= best.period_us and max(map(len, (planned.own(seat) for seat in view.live))) > 4


def test_what_the_exact_stage_cannot_do_is_named(monkeypatch) -> None:
    view, costs, policy = IMPROVABLE
    coupled = plan(view, costs, replace(policy, couple=True))
    large = Topology(4, 4, 32).full()
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(PlanError, match=r"recycle_plugin\[exact\]"):
        refined_exactly(plan(view, costs, policy), costs, 1.0)
    monkeypatch.undo()
    pytest.importorskip("ortools")
    with pytest.raises(PlanError, match="couple"):
        refined_exactly(coupled, costs, 1.0)
    with pytest.raises(PlanError, match="up to 800 operations, this job has 1536"):
        refined_exactly(plan(large, UNIT, Policy()), UNIT, 1.0)
