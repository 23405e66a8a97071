"""A search for a better order than the portfolio's: local search (``planner.climb``). It takes each stage's window for
itself; if stages share weights (``Problem.tie``), its result is timed with that.
"""

from __future__ import annotations

import numpy as np

from recycle_plugin.planner.climb import climb
from recycle_plugin.planner.flat import Array, Problem
from recycle_plugin.planner.list_scheduling import Solution, beginnings, timed
from recycle_plugin.planner.moves import Net


def net(problem: Problem, release: Array, closing: Array) -> Net:
    """Return the arrays that ``planner.climb`` reads. ``release``: when each stage's workers begin; ``closing``: from a
    stage's last end to the end of its window, microseconds.
    """
    records, width = problem.records, problem.width
    operation = np.arange(4 * records)
    kind, record = operation // records, operation % records
    stage = record // width
    backward = (kind == 1) | (kind == 3)
    gradient = np.arange(records, 2 * records) + (0 if problem.split else 2 * records)  # the I or the B of each record
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
    change = np.array([1, 0, -1, -1])[kind]
    stage_of = np.arange(problem.workers) // problem.ranks
    ahead, behind = _in_blocks(problem)
    return Net(
        source,
        lag,
        spend,
        change,
        follows,
        ahead,
        behind,
        problem.cap[stage_of],
        stage_of,
        release,
        closing,
        int(problem.synchronous),
    )


def _in_blocks(problem: Problem) -> tuple[Array, Array]:
    """Return the fields ``ahead`` and ``behind`` of a net: weight gradients of a block keep their order. Nothing else
    needs this: greedy's queues keep F, I and B of a block in order, and W follows its I.
    """
    records = problem.records
    later = np.flatnonzero(problem.follows_in_block)
    ahead, behind = np.full(4 * records, -1), np.full(4 * records, -1)
    for kind in (2, 3):
        ahead[kind * records + later] = kind * records + later - 1
        behind[kind * records + later - 1] = kind * records + later
    return ahead, behind


OPERATIONS_CLIMBED = 1_000_000  # in all moves of a polish together: bounds its time without looking at a clock
WORTH_CLIMBING = 40  # moves; a polish of fewer finds nothing


def polish(problem: Problem, best: Solution, least: int) -> Solution:
    """Return ``best`` after a fixed number of moves, so that every worker finds the same."""
    rounds = OPERATIONS_CLIMBED // best.order.size
    if rounds < WORTH_CLIMBING:
        return best
    heat = max(2, int(problem.cost[:3].mean())) // 2
    return climbed(problem, best, least, rounds, heat)


def climbed(problem: Problem, best: Solution, least: int, rounds: int, heat: int, seed: int = 0) -> Solution:
    """Return ``best``, or a shorter order found from it by ``rounds`` moves of :func:`planner.climb.climb`."""
    if problem.synchronous:
        release, closing = problem.step, problem.reduce + problem.tied
    else:
        release, closing = beginnings(problem, best), problem.closing
    order = best.order[np.argsort(best.starts, kind="stable")]
    who = np.tile(problem.worker, 4)
    climb(net(problem, release, closing), order, who, least, rounds, heat, seed)
    solution = timed(problem, order, least, best._replace(period=best.period + 1))
    return solution if solution.period <= best.period else best
