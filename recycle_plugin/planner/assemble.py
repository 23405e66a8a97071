"""From flat operations back to instructions: the last leg of planning."""

from __future__ import annotations

from typing import Mapping

from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.executor import Span
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.instruction import Instruction, Op
from recycle_plugin.core.plan import Plan, Policy
from recycle_plugin.core.topology import ClusterView
from recycle_plugin.planner.flat import Problem
from recycle_plugin.planner.schedule import Timing


def assemble(
    view: ClusterView,
    costs: CostModel,
    policy: Policy,
    route: Mapping[tuple[int, MicroBatch], Seat],
    problem: Problem,
    order: list[int],
    timing: Timing,
    bound_us: int,
) -> Plan:
    """The plan that ``order`` projects to, each program closed by its stage's reduce and step."""
    programs: dict[Seat, list[Instruction]] = {seat: [] for seat in sorted(view.live)}
    starts: dict[Seat, list[int]] = {seat: [] for seat in programs}
    kinds = (Op.F, Op.I, Op.W) if problem.kinds == 3 else (Op.F, Op.B)
    records, replicas, micro_batches = problem.records, problem.replicas, problem.micro_batches
    seats = [Seat(replica, stage) for stage in range(problem.stages) for replica in replicas]
    names = [MicroBatch(replica, index) for replica in replicas for index in range(micro_batches)]
    for operation in order:
        seat = seats[problem.worker[operation]]
        kind, record = divmod(operation, records)
        programs[seat].append(Instruction(kinds[kind], seat.stage, names[record % problem.width]))
        starts[seat].append(timing.starts[operation])
    _close(problem, policy, costs, timing, programs, starts)
    return Plan(
        view,
        policy,
        route,
        {seat: tuple(program) for seat, program in programs.items()},
        {seat: tuple(times) for seat, times in starts.items()},
        timing.period,
        bound_us,
        timing.span,
    )


def timeline(plan: Plan, costs: CostModel) -> list[Span]:
    """What the plan expects of one step in its steady state, as spans; microseconds from its first start."""
    return [
        Span(seat, instruction, start, start + costs.of(instruction.op, seat.stage))
        for seat, program in sorted(plan.programs.items())
        for instruction, start in zip(program, plan.starts[seat])
    ]


def _close(
    problem: Problem,
    policy: Policy,
    costs: CostModel,
    timing: Timing,
    programs: dict[Seat, list[Instruction]],
    starts: dict[Seat, list[int]],
) -> None:
    final = (problem.kinds - 1) * problem.records
    ends = [start + spent for start, spent in zip(timing.starts[final:], problem.duration[final:])]
    lasts = [max(ends[stage * problem.width : (stage + 1) * problem.width]) for stage in range(problem.stages)]
    reduce = [costs.of(Op.REDUCE, stage) for stage in range(problem.stages)]
    for seat, program in programs.items():
        reduce_at = max(lasts) if problem.synchronous else lasts[seat.stage]
        step_at = reduce_at + (max(reduce) if policy.validate else reduce[seat.stage])
        closing = [(Op.REDUCE, reduce_at), (Op.VALIDATE, step_at), (Op.STEP, step_at)]
        for op, at in closing:
            if op is not Op.VALIDATE or policy.validate:
                program.append(Instruction(op, seat.stage))
                starts[seat].append(at)
