"""Random small jobs, and the planner compared with the oracle on them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.planner.make import prepare, solve
from tests.support.cp_sat import exact, exists

CAPS = (1.0, 1.5, 2.0)


def small_case(random: Random, most: int) -> tuple[ClusterView, CostModel, Policy]:
    """Return a random job with failures and at most ``most`` operations. Its costs are units, whole numbers from 1 to
    3, or within 20% of each other between stages.
    """
    while True:
        shape = Topology(random.choice((1, 2, 2, 3)), random.choice((2, 3, 4)), random.choice((2, 3, 4, 6)))
        if 3 * shape.replicas * shape.stages * shape.micro_batches <= most:
            break
    lost = {
        Seat(random.randrange(shape.replicas), random.randrange(shape.stages))
        for _ in range(random.choice((0, 1, 1, 2)))
    }
    view = shape.full().without(*lost)
    if view.empty_stages():
        view = shape.full()
    costs = _small_costs(random, shape.stages)
    cap = max(1, round(shape.stages * random.choice(CAPS)))
    return view, costs, Policy(random.random() < 0.85, random.random() < 0.85, True, cap)


def _small_costs(random: Random, stages: int) -> CostModel:
    kind = random.choice(("unit", "whole", "near"))
    if kind == "near":
        shares = [random.randint(16, 24) for _ in range(stages)]
        rows = [[round(unit * share / 20) for share in shares] for unit in (10, 11, 9)]
    else:
        rows = [[1 if kind == "unit" else random.randint(1, 3) for _ in range(stages)] for _ in range(3)]
    forward, inputs, weight = map(tuple, rows)
    communication, step = random.choice((0, 0, 1)), random.choice((0, 1))
    return CostModel(forward, inputs, weight, communication=communication, step=(step,) * stages)


def against_exact(cases: int, exact_s: float, seed: int = 1, most: int = 96) -> list[dict]:
    """Return the planner's period and CP-SAT's best with its routes in ``cases`` random small jobs. Needs ortools."""
    random = Random(seed)
    rows: list[dict] = []
    while len(rows) < cases:
        view, costs, policy = small_case(random, most)
        problem = prepare(view, costs, policy)
        solution, least = solve(problem)
        best = exact(problem, solution, exact_s, threads=2, use_bound=True) if solution.period > least else None
        optimum = best.period if best else solution.period
        rows.append(
            {
                "pp": view.topology.stages,
                "dp": view.topology.replicas,
                "m": view.topology.micro_batches,
                "lost": " ".join(map(str, view.lost)),
                "cap": policy.activation_cap,
                "bound": least,
                "plan": solution.period,
                "optimum": optimum,
                "proven": best.least if best else least,
                "closed": best.optimal if best else True,
            }
        )
    return rows


def bounds_hold(cases: int, seed: int = 2, exact_s: float = 1.0, most: int = 36, tied: bool = False) -> dict:
    """Count the random small jobs in which CP-SAT finds a schedule below our bound, or proves that there is none.
    CP-SAT is not told the bound. ``tied``: the first and the last stage share weights. Needs ortools.
    """
    random, found, met = Random(seed), {True: 0, False: 0, None: 0}, 0
    for _ in range(cases):
        view, costs, policy = small_case(random, most)
        if tied:
            shape = replace(view.topology, ties=((0, view.topology.stages - 1),))
            view, costs = ClusterView(shape, view.live), replace(costs, reduce=(1,) * shape.stages, tie=1)
        problem = prepare(view, costs, policy)
        solution, least = solve(problem)
        found[exists(problem, solution, least - 1, exact_s)] += 1
        met += solution.period == least
    return {
        "cases": cases,
        "bound above an optimum": found[True],
        "proven not above": found[False],
        "not found out": found[None],
        "bound met by the plan": met,
    }
