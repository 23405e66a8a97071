"""Assembly, the last leg of planning: from flat operations back to programs."""

from __future__ import annotations

import numpy as np

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.program import OP_SHIFT, OPS, STAGE_SHIFT, Packed, Programs
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.planner.flat import KINDS, Array, Problem, met, routing_of
from recycle_plugin.planner.list_scheduling import Solution, windows_of
from recycle_plugin.planner.timing import project


def assemble(
    view: ClusterView, costs: CostModel, policy: Policy, problem: Problem, solution: Solution, bound_us: int
) -> Plan:
    """Return the plan of the solution's order. Each program ends with its stage's instructions at a step's end."""
    closing, closing_at = _closing(view, problem, policy, solution)
    seats, row, ends = _rows(view, problem, solution.order, (closing >= 0).sum(axis=1))
    codes, times = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.int64)
    project(
        solution.order,
        solution.starts,
        problem.stages,
        problem.ranks,
        problem.worker,
        row,
        ends,
        np.array(list(map(_code, KINDS)), np.int64),
        closing,
        closing_at,
        codes,
        times,
        np.array(problem.replicas, np.int64),
        problem.micro_batches,
    )
    edges = tuple(ends.tolist())
    return Plan(
        view,
        policy,
        routing_of(problem).named(view),
        Programs(seats, edges, codes.tobytes()),
        Packed(seats, edges, times.tobytes()),
        solution.period,
        bound_us,
        solution.span,
    )


def timeline(plan: Plan, costs: CostModel) -> list[Span]:
    """Return the spans that the plan expects of one step in its steady state, in microseconds from its first start."""
    return [
        Span(seat, instruction, start, start + costs.of(instruction.op, seat.stage, seat))
        for seat, program in plan.programs.items()
        for instruction, start in zip(program, plan.starts[seat])
    ]


def _code(op: Op) -> int:
    return OPS.index(op) << OP_SHIFT


def _rows(view: ClusterView, problem: Problem, order: Array, closing: Array) -> tuple[tuple[Seat, ...], Array, Array]:
    """Return the seats in order, the row of each worker (-1: none), and where each row ends."""
    seats = tuple(sorted(view.live))
    rank_of = {replica: rank for rank, replica in enumerate(problem.replicas)}
    workers = np.array([seat.stage * problem.ranks + rank_of[seat.replica] for seat in seats], np.int64)
    row = np.full(problem.workers, -1, np.int64)
    row[workers] = np.arange(len(seats))
    lengths = (
        np.bincount(problem.worker[order % problem.records], minlength=problem.workers)[workers]
        + closing[workers // problem.ranks]
    )
    return seats, row, np.cumsum(lengths)


def _closing(view: ClusterView, problem: Problem, policy: Policy, solution: Solution) -> tuple[Array, Array]:
    """Return the [stage, place] codes of the ops that end a stage's programs, -1 for none, and when each starts."""
    _, lasts = windows_of(problem, solution.order, solution.starts)
    tie_at, step_at = met(problem.tie, lasts + problem.reduce), problem.through(lasts) - problem.step
    tied = np.array([bool(view.topology.tie(stage)) for stage in range(problem.stages)])
    order, at = policy.closing(tied=True), {Op.REDUCE: lasts, Op.TIE: tie_at}
    codes = [
        np.where(tied | (op is not Op.TIE), _code(op) | np.arange(problem.stages) << STAGE_SHIFT, -1) for op in order
    ]
    return np.stack(codes, axis=1), np.stack([at.get(op, step_at) for op in order], axis=1)
