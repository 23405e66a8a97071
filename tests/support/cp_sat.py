"""Exact schedules by constraint programming: the oracle of tests and benchmarks.

Useful up to some 800 operations. Needs the extra ``exact`` (ortools). The model is the problem's own statement and
shares nothing with the scheduler but the :class:`Problem`. It has one start per operation, one operation at a time per
worker, memory as a cumulative resource, and weight gradients of a block in their order. The period is no shorter than
each stage's window with reduce and step. If stages share weights, the window is from the first start of one to the step
of any of them; if stages step together, it is from one barrier of all to the next. Routes are as given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from recycle_plugin.planner.bounds import bound
from recycle_plugin.planner.flat import Problem
from recycle_plugin.planner.list_scheduling import Solution, timed


class Exact(NamedTuple):
    """The result of an exact search, in microseconds: the best schedule's ``period``, and a lower bound, ``least``."""

    period: int
    least: int
    solution: Solution

    @property
    def optimal(self) -> bool:
        return self.period <= self.least


def exact(problem: Problem, start: Solution, budget_s: float, threads: int = 1, use_bound: bool = False) -> Exact:
    """Improve ``start`` for up to ``budget_s`` seconds. ``use_bound``: start at our own lower bound, and so trust it.
    Raises ImportError without ortools.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    starts, period = _model(model, problem, start, bound(problem) if use_bound else 0)
    model.minimize(period)
    for operation, at in zip(start.order.tolist(), start.starts.tolist()):
        model.add_hint(starts[operation], at)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = budget_s
    solver.parameters.num_workers = threads
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(
            start.period,
            int(np.ceil(solver.best_objective_bound - 1e-6)) if status == cp_model.UNKNOWN else start.period,
            start,
        )
    return _read(problem, solver, starts, start)


def exists(problem: Problem, start: Solution, period: int, budget_s: float) -> bool | None:
    """Return whether a schedule of at most ``period`` exists; None: not decided within ``budget_s`` seconds. ``start``
    gives the horizon. Raises ImportError without ortools.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    _model(model, problem, start, 0, period)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = budget_s
    solver.parameters.num_workers = 1
    return {cp_model.OPTIMAL: True, cp_model.FEASIBLE: True, cp_model.INFEASIBLE: False}.get(solver.solve(model))


def _model(model, problem: Problem, start: Solution, least: int, most: int | None = None):
    records, width, kinds = problem.records, problem.width, (0, 1, 2) if problem.split else (0, 3)
    horizon = 2 * start.span + int(problem.closing.max())
    worker, spend, in_turn = problem.worker.tolist(), problem.spend.tolist(), problem.follows_in_block.tolist()
    starts: dict[int, Any] = {}
    busy: list[list[Any]] = [[] for _ in range(problem.workers)]
    for kind in kinds:
        for record in range(records):
            operation = kind * records + record
            starts[operation] = model.new_int_var(0, horizon, "")
            busy[worker[record]].append(
                model.new_fixed_size_interval_var(starts[operation], spend[kind][worker[record]], "")
            )
    for intervals in busy:
        model.add_no_overlap(intervals)

    def end(kind: int, record: int):
        return starts[kind * records + record] + spend[kind][worker[record]]

    gradient = kinds[1]
    for record in range(records):
        if record >= width:
            model.add(starts[record] >= end(0, record - width) + int(problem.forward_lag[record]))
        needs = (
            end(0, record)
            if record >= records - width
            else end(gradient, record + width) + int(problem.backward_lag[record])
        )
        model.add(starts[gradient * records + record] >= needs)
        model.add(starts[gradient * records + record] >= end(0, record))
        if problem.split:
            model.add(starts[2 * records + record] >= end(1, record))
        if in_turn[record]:
            model.add(starts[kinds[-1] * records + record] >= end(kinds[-1], record - 1))
    _memory(model, problem, starts, end, horizon)
    return starts, _period(model, problem, starts, end, kinds[-1], least, start.period if most is None else most)


def _memory(model, problem: Problem, starts, end, horizon: int) -> None:
    """Add the constraints on memory: a micro-batch is held from F to the end of its B or W."""
    records, final = problem.records, 2 if problem.split else 3
    held: list[list] = [[] for _ in range(problem.workers)]
    for record in range(records):
        length = model.new_int_var(0, horizon, "")
        held[int(problem.worker[record])].append(model.new_interval_var(starts[record], length, end(final, record), ""))
    for worker, intervals in enumerate(held):
        model.add_cumulative(intervals, [1] * len(intervals), int(problem.cap[worker // problem.ranks]))


def _period(model, problem: Problem, starts, end, final: int, least: int, most: int):
    period, width = model.new_int_var(least, most, "period"), problem.width
    first = [model.new_int_var(0, 1 << 40, "") for _ in range(problem.stages)]
    for record in range(problem.records):
        stage = record // width
        model.add(first[stage] <= starts[record])
        if problem.synchronous:
            model.add(starts[record] >= int(problem.step[stage]))
            model.add(period >= end(final, record) + int(problem.reduce[stage] + problem.tied[stage]))
        else:
            for other in np.flatnonzero(problem.tie == problem.tie[stage]).tolist():
                model.add(
                    period >= end(final, record) - first[other] + int(problem.reduce[stage] + problem.after[other])
                )
    return period


def _read(problem: Problem, solver, starts, start: Solution) -> Exact:
    """Return the solver's solution, timed by our own rules."""
    least = int(np.ceil(solver.best_objective_bound - 1e-6))
    at = {operation: solver.value(variable) for operation, variable in starts.items()}

    def turn(operation: int) -> tuple[int, ...]:
        """Order operations that start together: those without duration first, gradients from the last stage up."""
        kind, record = divmod(operation, problem.records)
        return (
            at[operation],
            int(problem.spend[kind, problem.worker[record]]) > 0,
            kind,
            record if kind == 0 else -(record // problem.width),
            record,
        )

    ordered = sorted(at, key=turn)
    found = timed(problem, np.array(ordered, np.int64), int(solver.objective_value), start)
    return Exact(min(found.period, start.period), least, found)
