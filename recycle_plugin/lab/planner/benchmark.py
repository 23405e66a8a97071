"""The cases that ``scripts/bench_planner.py`` measures, as data; nothing here prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.lab.planner.cp_sat import exact, exists
from recycle_plugin.planner.make import plan, prepare, solve
from recycle_plugin.planner.warming import warm

CAPS = (1.0, 1.5, 2.0)
EXAMPLE = Topology(3, 4, 6)
SHOWN = ("pp", "dp", "m", "lost", "cap", "bound", "plan", "plan_gap")


def unequal(stages: int, seed: int = 0) -> CostModel:
    """A cost model in microseconds whose stages are within 20% of each other: F:I:W = 10:11:9, communication a tenth of
    F, the step half of it, the reduction one and a half times.
    """
    random = Random(seed * 1000 + stages)
    shares = [random.uniform(0.8, 1.2) for _ in range(stages)]
    forward, inputs, weight = (tuple(round(unit * share) for share in shares) for unit in (1000, 1100, 900))
    return CostModel(forward, inputs, weight, communication=100, reduce=(1500,) * stages, step=(500,) * stages)


COSTS: dict[str, Callable[[int], CostModel]] = {"unit": CostModel.uniform, "unequal": unequal}


def example() -> list[dict]:
    """One row for each schedule of the papers' running example, with the least memory with which its period is
    reached.
    """
    full, lost = EXAMPLE.full(), EXAMPLE.full().without(Seat(1, 2))
    costs = CostModel.uniform(4)
    stock = Policy(split_backward=False, stagger_optimizer=False)
    split = Policy(stagger_optimizer=False)
    rows = []
    for name, view, policy, cap, goal in (
        ("fault-free 1F1B", full, replace(stock, reroute=False), None, 27),
        ("rerouted", lost, stock, "1f1b", 36),
        ("rerouted", lost, stock, 8, 33),
        ("+ split", lost, split, 8, 29),
        ("+ split, staggered", lost, Policy(), 8, 27),
    ):
        planned = plan(view, costs, replace(policy, activation_cap=cap))
        peaks = peak(planned)
        least = least_cap(view, costs, policy, planned.period_us) if view.lost else "-"
        rows.append(
            {
                "schedule": name,
                "cap": cap or "1f1b",
                "period": planned.period_us,
                "goal": goal,
                "bound": planned.bound_us,
                "peak per stage": " ".join(map(str, peaks)),
                "least: uniform cap": least,
                "least: stage 2, others PP": least_on_stage(view, costs, policy, planned.period_us, 2)
                if view.lost
                else "-",
            }
        )
    return rows


def peak(planned: Plan) -> list[int]:
    """The most micro-batches that a worker of each stage holds at once."""
    most = [0] * planned.stages
    for seat, program in planned.programs.items():
        held = 0
        for one in program:
            held += {"F": 1, "W": -1, "B": -1}.get(one.op.value, 0)
            most[seat.stage] = max(most[seat.stage], held)
    return most


def least_cap(view: ClusterView, costs: CostModel, policy: Policy, period: int) -> int:
    """The least activation cap, the same on every stage, with which ``period`` is reached; "more" where twice PP is too
    little.
    """
    return _least(view, costs, policy, period, lambda cap: cap)


def least_on_stage(view: ClusterView, costs: CostModel, policy: Policy, period: int, stage: int) -> int | str:
    """The least activation cap of ``stage`` with which ``period`` is reached, where all others hold PP micro-batches;
    "more" where twice PP is too little.
    """
    stages = view.topology.stages
    return _least(
        view, costs, policy, period, lambda cap: tuple(cap if at == stage else stages for at in range(stages))
    )


def _least(view, costs, policy, period, cap_of):
    for cap in range(1, 2 * view.topology.stages + 1):
        if plan(view, costs, replace(policy, activation_cap=cap_of(cap))).period_us <= period:
            return cap
    return "more"


def patterns(stages: int, replicas: int) -> list[tuple[Seat, ...]]:
    """The sets of lost seats of the grid: 1 to DP - 1 failures in the middle stage, and spread over stages and
    replicas.
    """
    found = []
    for failures in range(1, replicas):
        found.append(tuple(Seat(replica, stages // 2) for replica in range(failures)))
        spread = tuple(Seat(place % replicas, (stages // 2 + place) % stages) for place in range(failures))
        if spread not in found:
            found.append(spread)
    return found


def grid() -> Iterator[tuple[int, int, int, tuple[Seat, ...], float]]:
    """The cases of the grid: PP, DP, M, who is lost, and the activation cap in units of PP."""
    for stages in (2, 4, 8):
        for replicas in (2, 3, 4, 8):
            for micro_batches in (4, 8, 16, 32):
                for lost in patterns(stages, replicas):
                    for cap in CAPS:
                        yield stages, replicas, micro_batches, lost, cap


def case(stages: int, replicas: int, micro_batches: int, lost: tuple[Seat, ...], cap: float, costs_name: str) -> dict:
    """The figures of one case of the grid: periods in microseconds, gaps in percent of the bound, CPU milliseconds."""
    costs, view = COSTS[costs_name](stages), Topology(replicas, stages, micro_batches).full().without(*lost)
    started = time.process_time()
    planned = plan(view, costs, Policy(activation_cap=int(cap * stages)))
    spent = time.process_time() - started
    return {
        "pp": stages,
        "dp": replicas,
        "m": micro_batches,
        "lost": " ".join(map(str, lost)),
        "cap": cap,
        "bound": planned.bound_us,
        "plan": planned.period_us,
        "plan_gap": 100 * planned.gap,
        "plan_ms": 1000 * spent,
    }


def summary(rows: list[dict]) -> list[dict]:
    """The rows of the grid summed up, by cap and M."""
    keys = sorted({(row["cap"], row["m"]) for row in rows})
    return [_spread([row for row in rows if (row["cap"], row["m"]) == key], *key) for key in keys]


def _spread(rows: list[dict], cap: float, micro_batches: int) -> dict:
    gaps = [row["plan_gap"] for row in rows]
    return {
        "cap": cap,
        "M": micro_batches,
        "cases": len(rows),
        "met %": share(gaps, 0),
        "<= 1%": share(gaps, 1),
        "mean %": sum(gaps) / len(gaps),
        "max %": max(gaps),
    }


def share(gaps: list[float], most: float) -> float:
    """The percentage of ``gaps`` that are no larger than ``most``."""
    return 100 * sum(gap <= most + 1e-9 for gap in gaps) / max(1, len(gaps))


def goals(rows: list[dict], costs_name: str) -> list[dict]:
    """The goals that were set for the grid, each with what was found."""

    def gaps(cap: float, least: int) -> list[float]:
        return [row["plan_gap"] for row in rows if row["cap"] == cap and row["m"] >= least] or [0.0]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    if costs_name == "unit":
        return [
            {"goal": "met exactly at 2x, M >= 8, in >= 95%", "found": share(gaps(2.0, 8), 0)},
            {"goal": "within 1% at 1.5x, M >= 16, in >= 99%", "found": share(gaps(1.5, 16), 1)},
            {"goal": "mean <= 1% at 1x, M >= 16", "found": mean(gaps(1.0, 16))},
            {"goal": "max <= 7% at 1x, M >= 16", "found": max(gaps(1.0, 16))},
        ]
    return [
        {"goal": "mean <= 1% at 1.5x, M >= 16", "found": mean(gaps(1.5, 16))},
        {"goal": "(max at 1.5x, M >= 16)", "found": max(gaps(1.5, 16))},
        {"goal": "(mean at 1x, M >= 16)", "found": mean(gaps(1.0, 16))},
    ]


def small_case(random: Random, most: int) -> tuple[ClusterView, CostModel, Policy]:
    """A random job of at most ``most`` operations with failures; unit costs, whole costs from 1 to 3, or stages within
    20%.
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
    """One row for each of ``cases`` random small jobs: the planner's periods beside CP-SAT's best with the same routes.
    Needs ortools.
    """
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


def exact_summary(rows: list[dict]) -> list[dict]:
    """The rows of :func:`against_exact` summed up: gaps to the optimum in percent."""
    lines = []
    for name in ("plan", "bound"):
        gaps = [100 * abs(row[name] / row["optimum"] - 1) for row in rows]
        lines.append(
            {
                "of": name,
                "cases": len(rows),
                "closed": sum(row["closed"] for row in rows),
                "mean %": sum(gaps) / len(gaps),
                "max %": max(gaps),
            }
        )
    return lines


def bounds_hold(cases: int, seed: int = 2, exact_s: float = 1.0, most: int = 36, tied: bool = False) -> dict:
    """The number of random small jobs in which CP-SAT, not told our bound, finds a schedule that is shorter than that,
    and of those where it proves that there is none.  Needs ortools.

    ``tied``: the first and the last stage share weights.
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


def blame(costs_name: str, exact_s: float, most: int = 8, operations: int = 800) -> list[dict]:
    """Whom CP-SAT blames in the grid's cases with more than 1% of gap that it can handle: the plan, for which it finds
    a shorter schedule, or the bound, where it proves that there is none below what it found.  Needs ortools.
    """
    rows = []
    jobs = [one for one in grid() if 3 * one[0] * one[1] * one[2] <= operations]
    for stages, replicas, micro_batches, lost, cap in sorted(
        jobs, key=lambda one: (one[0] * one[1] * one[2], str(one))
    ):
        view = Topology(replicas, stages, micro_batches).full().without(*lost)
        problem = prepare(view, COSTS[costs_name](stages), Policy(activation_cap=int(cap * stages)))
        solution, least = solve(problem)
        if solution.period <= 1.01 * least:
            continue
        best = exact(problem, solution, exact_s, threads=2, use_bound=True)
        plan_blamed, bound_blamed = best.period < solution.period, best.least > least
        rows.append(
            {
                "pp": stages,
                "dp": replicas,
                "m": micro_batches,
                "lost": " ".join(map(str, lost)),
                "cap": cap,
                "bound": least,
                "plan": solution.period,
                "CP-SAT": best.period,
                "proven": best.least,
                "to blame": {(True, True): "both", (True, False): "plan", (False, True): "bound"}.get(
                    (plan_blamed, bound_blamed), "open"
                ),
            }
        )
        if len(rows) == most:
            break
    return rows


def large(draws: int = 3) -> list[dict]:
    """The gaps of plans for 1,536 workers with 5% lost."""
    rows = []
    for costs_name in ("unit", "unequal"):
        for draw in range(draws):
            topology = Topology(48, 32, 64)
            view = topology.full().without(
                *Random(draw).sample(topology.seats, topology.replicas * topology.stages // 20)
            )
            planned = plan(view, COSTS[costs_name](32), Policy(activation_cap=48))
            rows.append(
                {
                    "costs": costs_name,
                    "draw": draw,
                    "bound": planned.bound_us,
                    "plan gap %": 100 * planned.gap,
                }
            )
    return rows


def speed(draws: int = 3) -> list[dict]:
    """The time from a set of live seats to a verified and hashed plan, in CPU milliseconds, for jobs of several
    sizes.
    """
    warm()
    rows = []
    for name, shape, failures in (
        ("PP=4 DP=3 M=6", Topology(3, 4, 6), 1),
        ("PP=8 DP=4 M=32", Topology(4, 8, 32), 1),
        ("PP=8 DP=4 M=32", Topology(4, 8, 32), 2),
        ("PP=32 DP=48 M=64", Topology(48, 32, 64), 76),
        ("PP=32 DP=96 M=64", Topology(96, 32, 64), 153),
        ("PP=32 DP=192 M=64", Topology(192, 32, 64), 307),
    ):
        for costs_name in ("unit", "unequal"):
            times, gaps = [], []
            for draw in range(draws if shape.replicas < 90 else 1):
                live = frozenset(set(shape.seats) - set(Random(draw).sample(shape.seats, failures)))
                started = time.process_time()
                planned = plan(
                    ClusterView(Topology(shape.replicas, shape.stages, shape.micro_batches), live),
                    COSTS[costs_name](shape.stages),
                    Policy(activation_cap=3 * shape.stages // 2),
                )
                _ = planned.digest
                times.append(1000 * (time.process_time() - started))
                gaps.append(100 * planned.gap)
            rows.append(
                {
                    "job": name,
                    "lost": failures,
                    "costs": costs_name,
                    "median ms": sorted(times)[len(times) // 2],
                    "max ms": max(times),
                    "max gap %": max(gaps),
                }
            )
    return rows
