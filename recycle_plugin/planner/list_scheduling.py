"""List scheduling: one global order of a step's operations, greedy, under a fixed portfolio of rules.

Programs are projections of this one order, so they can't deadlock. A free worker takes I before F (if its memory
allows) before W: I unblocks others, W is filler. The key of F is the micro-batch index, because taking them in order of
arrival is 25-70% worse. Variations of that rule are tried until the period meets the lower bound. No clock decides how
many, so that all workers find the same plan.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from recycle_plugin.planner.flat import Array, Problem
from recycle_plugin.planner.greedy import SchedulingProblem, greedy
from recycle_plugin.planner.timing import evaluate, extent


class SchedulingRule(NamedTuple):
    """A rule by which a worker chooses what it begins next. The first six fields are what the compiled loop reads.

    ``burst``: hold the last so many F until memory fits all of them. ``pause``: once memory is full, wait until so many
    places are free. ``ahead``: how far the F of a worker may run ahead of its I, beyond 1F1B's depth, plus one (0: no
    limit). ``lead``: F goes before I while fewer than 1F1B's depth plus so many, less one, are ahead (0: never). That
    is the steady state of the zero-bubble paper's ZB-H1 (Qi et al., ICLR'24), which needs no more memory than 1F1B.
    ``wait_weight``, ``wait_forward``: stay idle rather than begin a W or an F when a gradient is known to arrive within
    so many percent of its time. ``forward``: ties between an own and a rerouted micro-batch of one index: 0 own first,
    1 rerouted first; 2: order of arrival. ``backward``: 0 index, 1 arrival. ``settled``: begin as the step before has
    left the stages, instead of all at once.
    """

    burst: int = 0
    pause: int = 0
    ahead: int = 0
    lead: int = 0
    wait_weight: int = 0
    wait_forward: int = 0
    forward: int = 0
    backward: int = 0
    settled: bool = False


class Solution(NamedTuple):
    """An order of operations, their starts in microseconds (int64, per operation), and its ``period`` and ``span``."""

    order: Array
    starts: Array
    period: int
    span: int


TRIALS_AT_LEAST = 2
OPERATIONS_TRIED = 20_000  # in all trials together: bounds the time of planning without looking at a clock
NEVER = 1 << 60


def portfolio(stages: int) -> tuple[SchedulingRule, ...]:
    """Return the rules to try, in an order found by greedy cover over 220 jobs of 2 to 8 stages, half of them with
    unequal costs: each adds most to those before it.
    """
    half = stages // 2
    return (
        SchedulingRule(forward=1, lead=1),
        SchedulingRule(forward=1, backward=1, burst=stages, pause=2, lead=2, settled=True),
        SchedulingRule(burst=half, pause=half, lead=half),
        SchedulingRule(forward=1, burst=2 * stages, pause=stages, lead=2, wait_weight=30),
        SchedulingRule(ahead=3, lead=1, wait_weight=30, wait_forward=60, settled=True),
        SchedulingRule(burst=stages, pause=2, lead=stages),
        SchedulingRule(forward=1, burst=half, pause=stages, lead=1, wait_weight=30, wait_forward=30),
        SchedulingRule(forward=2, pause=half, lead=half, wait_weight=30, wait_forward=30),
        SchedulingRule(lead=2),
        SchedulingRule(forward=1, burst=stages, lead=2),
        SchedulingRule(forward=1, burst=half, pause=stages, lead=3, wait_weight=30, settled=True),
        SchedulingRule(forward=1, pause=2, lead=1),
        SchedulingRule(forward=1, pause=2, ahead=2, lead=2, wait_forward=30, settled=True),
        SchedulingRule(),
    )


def best_order(problem: Problem, least: int) -> Solution:
    """Return the best order that the portfolio finds; stop at ``least``, the lower bound. If tensors take time to
    travel, each rule is also tried as if they didn't: a greedy worker begins other work while a tensor travels, and the
    tensor then waits longer than the worker would have.
    """
    views = (problem, _at_once(problem)) if problem.forward_lag.any() else (problem,)
    trials = max(TRIALS_AT_LEAST, OPERATIONS_TRIED // (3 * problem.records))
    rules, best = portfolio(problem.stages)[: -(-trials // len(views))], None
    for rule, seen in product(rules, views):
        best = better(problem, rule, least, best, seen)
        if best.period <= least:
            break
    assert best is not None
    return best


def _at_once(problem: Problem) -> Problem:
    """Return the same problem without travel times."""
    return replace(
        problem, forward_lag=np.zeros_like(problem.forward_lag), backward_lag=np.zeros_like(problem.backward_lag)
    )


def better(
    problem: Problem, rule: SchedulingRule, least: int, best: Solution | None, seen: Problem | None = None
) -> Solution:
    """Return ``best``, or what ``rule`` finds if that is shorter. ``seen``: the problem as the rule sees it."""
    wake = beginnings(problem, best) if rule.settled and best else np.zeros(problem.stages, np.int64)
    order = greedy_order(seen or problem, rule, *keys(problem, rule), wake)
    return timed(problem, order, least, best)


def greedy_order(problem: Problem, rule: SchedulingRule, forward: Array, backward: Array, wake: Array) -> Array:
    """Return all operations by their starts under ``rule``, given keys per record and when each stage wakes."""
    order = np.empty(3 * problem.records, np.int64)
    job = SchedulingProblem(
        problem.stages,
        problem.ranks,
        int(problem.split),
        problem.worker,
        problem.spend,
        problem.forward_lag,
        problem.backward_lag,
        problem.loads,
        problem.cap,
        forward,
        backward,
        wake,
        np.array(rule[:6], np.int64),
    )
    return order[: greedy(job, order)]


def timed(problem: Problem, order: Array, least: int, best: Solution | None = None) -> Solution:
    """Return ``best``, or ``order`` with its shortest period if that is shorter."""
    starts = np.empty(order.size, np.int64)
    below = NEVER if best is None else best.period
    period = evaluate(
        order,
        problem.stages,
        problem.ranks,
        int(problem.synchronous),
        problem.worker,
        problem.spend,
        problem.forward_lag,
        problem.backward_lag,
        problem.reduce,
        problem.tie,
        problem.after,
        problem.step,
        least,
        below,
        starts,
    )
    if period < 0:
        assert best is not None
        return best
    firsts, lasts = windows_of(problem, order, starts)
    return Solution(order, starts - firsts.min(), period, int(lasts.max() - firsts.min()))


def windows_of(problem: Problem, order: Array, starts: Array) -> tuple[Array, Array]:
    """Return the first start and the last end of each stage, in the clock of ``starts``."""
    return extent(order, starts, problem.stages, problem.ranks, problem.worker, problem.spend)


def beginnings(problem: Problem, solution: Solution) -> Array:
    """Return when the step before leaves each stage free, in the clock of ``solution``."""
    _, lasts = windows_of(problem, solution.order, solution.starts)
    return np.maximum(problem.through(lasts) - solution.period, 0)


def keys(problem: Problem, rule: SchedulingRule) -> tuple[Array, Array]:
    """Return the keys of F and of I per record, int64; -1: the time of arrival."""
    record = np.arange(problem.records)
    index = record % problem.micro_batches
    rerouted = problem.worker != record // problem.micro_batches
    key = 2 * index + (rerouted != (rule.forward == 1))
    arrival = np.full(problem.records, -1, np.int64)
    return arrival if rule.forward == 2 else key, arrival if rule.backward else key
