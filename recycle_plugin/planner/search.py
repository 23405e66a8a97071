"""A search for better orders than the portfolio's: local search (``planner.climb``) and random restarts.

The local search takes each stage's window for itself; where stages share weights (``Problem.tie``), what it finds is
timed with that.

``polish`` makes a fixed number of moves, so that every worker finds the same; ``search`` goes by a clock (its own CPU
time).
"""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import numpy as np

from recycle_plugin.planner.climb import climb
from recycle_plugin.planner.flat import Array, Problem
from recycle_plugin.planner.list_scheduling import (
    SchedulingRule,
    Solution,
    beginnings,
    better,
    further,
    greedy_order,
    keys,
    timed,
)
from recycle_plugin.planner.moves import Net


def net(problem: Problem, order: Array, release: Array, closing: Array, deal: bool) -> Net:
    """The arrays that ``planner.climb`` reads.

    ``order`` tells which backwards are coupled; ``release``: when each stage's workers begin; ``closing``: from a
    stage's last end to the end of its window, microseconds.  ``deal``: rerouted micro-batches may change their worker.
    """
    records, width = problem.records, problem.width
    operation = np.arange(4 * records)
    kind, record = operation // records, operation % records
    stage = record // width
    backward = (kind == 1) | (kind == 3)
    joint = order[order >= 3 * records] - 3 * records
    gradient = np.arange(records, 2 * records)  # the I or the B of each record
    gradient[joint] += 2 * records
    source = np.full(4 * records, -1)
    source[width:records] = np.arange(records - width)
    source[backward] = np.concatenate([gradient[width:], np.arange(records - width, records)])[record[backward]]
    source[kind == 2] = records + record[kind == 2]
    lag = np.where(
        kind == 0,
        problem.forward_lag[record],
        np.where(backward & (stage < problem.stages - 1), problem.backward_lag[record], 0),
    )
    follows = np.full((2, 4 * records), -1)
    follows[0, : records - width] = np.arange(width, records)
    follows[0, records - width : records] = gradient[records - width :]
    for kind_of in (1, 3):
        follows[0, kind_of * records + width : (kind_of + 1) * records] = gradient[: records - width]
    follows[1, records : 2 * records] = 2 * records + np.arange(records)
    spend = np.concatenate([problem.spend[kind, problem.worker[record]], np.zeros(problem.workers, np.int64)])
    activation, pending = problem.memory.activation[stage], problem.memory.pending[stage]
    change = np.choose(kind, [activation, pending - activation, -pending, -activation])
    stage_of = np.arange(problem.workers) // problem.ranks
    ahead, behind, mate = _in_blocks(problem)
    may_deal = (problem.worker != np.arange(records) // problem.micro_batches) & deal
    return Net(
        source,
        lag,
        spend,
        change,
        follows,
        ahead,
        behind,
        problem.memory.cap[stage_of],
        stage_of,
        release,
        closing,
        int(problem.synchronous),
        np.flatnonzero(may_deal),
        may_deal.astype(np.int64),
        mate,
    )


def _in_blocks(problem: Problem) -> tuple[Array, Array, Array]:
    """The fields ``ahead``, ``behind`` and ``mate`` of a net: weight gradients of a block keep their order, and a block
    has one worker.

    Nothing else has to be held to that order: greedy's queues keep F, I and B of a block in it, and W follows its I.
    """
    records = problem.records
    later = np.flatnonzero(problem.follows_in_block)
    ahead, behind, mate = np.full(4 * records, -1), np.full(4 * records, -1), np.arange(records)
    for kind in (2, 3):
        ahead[kind * records + later] = kind * records + later - 1
        behind[kind * records + later - 1] = kind * records + later
    for record in later:  # into the circle, behind the one before
        mate[record], mate[record - 1] = mate[record - 1], record
    return ahead, behind, mate


OPERATIONS_CLIMBED = 1_000_000  # in all moves of a polish together: bounds its time without looking at a clock
WORTH_CLIMBING = 40  # moves; a polish of fewer finds nothing
OPERATIONS_A_LEG = 40_000_000  # in all moves of one climb of a search
RESTARTS = 0.3  # of a search's climbs: the share that begins with another rule's order


def polish(problem: Problem, best: Solution, least: int) -> Solution:
    """The solution ``best`` after a fixed number of moves."""
    rounds = OPERATIONS_CLIMBED // best.order.size
    return best if rounds < WORTH_CLIMBING else climbed(problem, best, least, rounds, _typical(problem) // 2, seed=0)[1]


def fused(problem: Problem, best: Solution, least: int) -> Solution:
    """The solution ``best`` with B for every I whose W follows at once, on all stages or the first alone, where that is
    no slower.

    One B holds no pending weight gradient in between, and is dispatched once.
    """
    worker, kind = problem.worker[best.order % problem.records], best.order // problem.records
    in_turn = np.argsort(worker, kind="stable")
    first, second = in_turn[:-1], in_turn[1:]
    pairs = (kind[first] == 1) & (best.order[second] == best.order[first] + problem.records)
    for stages in (problem.stages, 1):
        chosen = pairs & (worker[first] < stages * problem.ranks)
        order = best.order.copy()
        order[first[chosen]] += 2 * problem.records
        order = np.delete(order, second[chosen])
        found = timed(problem, order, least, best._replace(period=best.period + 1))
        if found.period <= best.period:
            return found
    return best


def search(problem: Problem, best: Solution, least: int, budget_s: float, seed: int = 0) -> tuple[Problem, Solution]:
    """The best solution that ``budget_s`` seconds of one core find by restarts and local search; stops at ``least``.

    The problem is the one given, or where its workers are alike perhaps one with other routes of the rerouted
    micro-batches.
    """
    random, until, rounds = Random(seed), time.thread_time() + budget_s, max(300, OPERATIONS_A_LEG // best.order.size)
    for rule in further(problem.stages):
        if best.period > least and time.thread_time() < until:
            best = better(problem, rule, least, best)
    while best.period > least and time.thread_time() < until:
        here, start = problem, best
        if random.random() < RESTARTS:
            start = timed(problem, _any_order(problem, best, random), least)
        heat = int(_typical(problem) * random.choice((0.25, 0.5, 0.5, 1)))
        for _ in range(random.choice((1, 2, 4))):
            here, start = climbed(here, start, least, rounds, heat, random.getrandbits(30), deal=problem.alike)
            if start.period <= least or time.thread_time() > until:
                break
        if start.period <= best.period:
            problem, best = here, start
    return problem, best


def _typical(problem: Problem) -> int:
    """A usual duration of an operation, at least 2."""
    return max(2, int(problem.cost[:3].mean()))


def _any_order(problem: Problem, best: Solution, random: Random) -> Array:
    """The order that a random rule gives, with random ties."""
    stages = problem.stages
    rule = SchedulingRule(
        burst=random.choice((0, 0, stages // 2, stages, 2 * stages)),
        pause=random.choice((0, 0, 2, stages // 2, stages)),
        ahead=random.choice((0, 0, 0, 1, 2, 3, 4)),
        lead=random.choice((0, 1, 2, 3, stages // 2 + 1, stages)),
        eager=random.choice((0, 0, 0, 1, 2, 3)),
        couple=random.choice((0, 1, 2, 3)),
        wait_weight=random.choice((0, 0, 30, 60, 100)),
        wait_forward=random.choice((0, 0, 0, 30, 60)),
        forward=random.choice((0, 1, 1, 2)),
        backward=random.choice((0, 0, 1)),
    )
    noise = np.random.default_rng(random.getrandbits(30))
    # of each record's block: it has the same
    first = np.maximum.accumulate(np.where(problem.follows_in_block, 0, np.arange(problem.records)))
    forward, backward = (
        key if key[0] < 0 else key * 16 + noise.integers(0, random.choice((1, 8, 24, 64)), problem.records)[first]
        for key in keys(problem, rule)
    )
    wake = beginnings(problem, best) if random.random() < 0.5 else np.zeros(stages, np.int64)
    return greedy_order(problem, rule, forward, backward, wake)


def climbed(
    problem: Problem, best: Solution, least: int, rounds: int, heat: int, seed: int, deal: bool = False
) -> tuple[Problem, Solution]:
    """The solution ``best``, or a shorter order found from it in ``rounds`` moves, and the problem that it solves.

    ``deal``: rerouted micro-batches may change their worker, which makes it another problem; only where workers are
    alike.
    """
    if problem.synchronous:
        release, closing = problem.step, problem.reduce + problem.tied
    else:
        release, closing = beginnings(problem, best), problem.closing
    order, who = (
        best.order[np.argsort(best.starts, kind="stable")],
        problem.worker[np.arange(4 * problem.records) % problem.records],
    )
    climb(net(problem, order, release, closing, deal), order, who, least, rounds, heat, seed)
    worker = who[: problem.records]
    found = replace(problem, worker=worker, loads=np.bincount(worker, minlength=problem.workers)) if deal else problem
    solution = timed(found, order, least, best._replace(period=best.period + 1))
    return (found, solution) if solution.period <= best.period else (problem, best)
