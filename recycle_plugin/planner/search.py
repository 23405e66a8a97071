"""Better orders than the portfolio's: local search (``planner.climb``) and random restarts.

``polish`` makes a fixed number of moves, so that every worker finds the same; ``search`` goes by a clock (its own CPU time).
"""

from __future__ import annotations

import time
from random import Random
from typing import NamedTuple

import numpy as np

from recycle_plugin.planner.climb import climb
from recycle_plugin.planner.flat import Array, Problem
from recycle_plugin.planner.schedule import Rule, Solution, beginnings, better, further, greedy_order, keys, timed


class Net(NamedTuple):
    """Operations as nodes, for ``planner.climb``; all arrays but two are over operations, int64."""

    source: Array  # the slot of the result that it needs, -1: none
    lag: Array  # from that result to its earliest start
    slot: Array  # where its own result's time stands; then, per slot, the operation that fills it
    who: Array
    spend: Array
    change: Array  # of the memory held
    cap: Array  # [worker]
    stage_of: Array  # [worker]
    follows: Array  # [2, operation]: who needs its result, -1: nobody


def net(problem: Problem, order: Array) -> Net:
    """``order`` tells which backwards are coupled."""
    records, width = problem.records, problem.width
    operation = np.arange(4 * records)
    kind, record = operation // records, operation % records
    here = problem.worker[record]
    stage = record // width
    backward = (kind == 1) | (kind == 3)
    source = np.full(4 * records, -1)
    source[width:records] = np.arange(records - width)
    to_gradient = np.where(record >= records - width, record, records + record + width)
    source[backward] = to_gradient[backward]
    source[kind == 2] = records + record[kind == 2]
    lag = np.where(kind == 0, problem.forward_lag[record], np.where(backward & (stage < problem.stages - 1), problem.backward_lag[record], 0))
    slot = np.where(kind == 3, records + record, operation)
    maker = operation.copy()
    joint = order[order >= 3 * records] - 3 * records
    maker[records + joint] = 3 * records + joint
    gradient = maker[records : 2 * records]
    follows = np.full((2, 4 * records), -1)
    follows[0, : records - width] = np.arange(width, records)
    follows[0, records - width : records] = gradient[records - width :]
    for kind_of in (1, 3):
        follows[0, kind_of * records + width : (kind_of + 1) * records] = gradient[: records - width]
    follows[1, records : 2 * records] = 2 * records + np.arange(records)
    activation, pending = problem.memory.activation[stage], problem.memory.pending[stage]
    change = np.choose(kind, [activation, pending - activation, -pending, -activation])
    stage_of = np.arange(problem.workers) // problem.ranks
    return Net(
        source, lag, np.concatenate([slot, maker]), here, problem.spend[kind, here], change, problem.memory.cap[stage_of], stage_of, follows
    )  # fmt: skip


OPERATIONS_CLIMBED = 450_000  # in all moves of a polish together: bounds its time without looking at a clock
LEGS = 3  # of a polish; after each, the stages' beginnings are taken from the best order again
WORTH_CLIMBING = 40  # moves; a polish of fewer finds nothing


def polish(problem: Problem, best: Solution, least: int) -> Solution:
    """``best`` after a fixed number of moves."""
    rounds = OPERATIONS_CLIMBED // best.order.size // LEGS
    for leg in range(LEGS if rounds >= WORTH_CLIMBING else 0):
        if best.period <= least:
            break
        best = climbed(problem, best, least, rounds, _typical(problem) // 2, leg)
    return best


def fused(problem: Problem, best: Solution, least: int) -> Solution:
    """``best`` with B for every I whose W follows at once, on all stages or the first alone, where that is no slower.

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


def search(problem: Problem, best: Solution, least: int, budget_s: float, seed: int = 0) -> Solution:
    """The best that ``budget_s`` seconds of one core find by restarts and local search; stops at ``least``."""
    random, until, rounds = Random(seed), time.thread_time() + budget_s, max(300, 3_000_000 // best.order.size)
    for rule in further(problem.stages):
        if best.period > least and time.thread_time() < until:
            best = better(problem, rule, least, best)
    while best.period > least and time.thread_time() < until:
        start = best if random.random() < 0.6 else timed(problem, _any_order(problem, best, random), least)
        heat = int(_typical(problem) * random.choice((0.25, 0.5, 1, 2)))
        legs = random.choice((1, 2, 4))
        for _ in range(legs):
            start = climbed(problem, start, least, rounds, heat, random.getrandbits(30))
            if start.period <= least or time.thread_time() > until:
                break
        best = min(start, best, key=lambda solution: solution.period)
    return best


def _typical(problem: Problem) -> int:
    """A usual duration of an operation, at least 1."""
    return max(2, int(problem.cost[:3].mean()))


def _any_order(problem: Problem, best: Solution, random: Random) -> Array:
    """What a random rule gives, with random ties."""
    stages = problem.stages
    rule = Rule(
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
    forward, backward = (
        key if key[0] < 0 else key * 16 + noise.integers(0, random.choice((1, 8, 24, 64)), problem.records) for key in keys(problem, rule)
    )
    wake = beginnings(problem, best) if random.random() < 0.5 else np.zeros(stages, np.int64)
    return greedy_order(problem, rule, forward, backward, wake, problem.memory.cap)


def climbed(problem: Problem, best: Solution, least: int, rounds: int, heat: int, seed: int) -> Solution:
    """``best``, or a shorter order found from it in ``rounds`` moves."""
    graph, order = net(problem, best.order), best.order[np.argsort(best.starts, kind="stable")]
    if problem.synchronous:
        release, closing = np.zeros(problem.stages, np.int64), np.full(problem.stages, problem.joint_closing)
    else:
        release, closing = beginnings(problem, best), problem.closing
    climb(order, *graph, release, closing, int(problem.synchronous), least, rounds, heat, seed)
    return timed(problem, order, least, best)
