"""From a plan to what a worker executes: data loading and transport put around the computation."""

from __future__ import annotations

from typing import Iterator

from recycle_plugin.core.ids import Seat
from recycle_plugin.core.instruction import Instruction, Op
from recycle_plugin.core.plan import Plan


def lower(plan: Plan, seat: Seat, step: int) -> tuple[Instruction, ...]:
    """``seat``'s program of ``step`` with LOAD and RECV right before their consumer, SEND right after the producer.

    The first stage loads inputs, the last one labels, a job of one stage both at once.  Raises KeyError
    for a seat that the plan does not have.
    """
    return tuple(lowered for instruction in plan.programs[seat] for lowered in _surround(plan, instruction, step))


def _surround(plan: Plan, instruction: Instruction, step: int) -> Iterator[Instruction]:
    op, stage, micro_batch = instruction.op, instruction.stage, instruction.micro_batch
    first, last = stage == 0, stage == plan.stages - 1
    if op is Op.F and not first:
        yield Instruction(Op.RECV_ACT, stage, micro_batch, step, plan.route[stage - 1, micro_batch])
    if op is Op.F and (first or last):
        yield Instruction(Op.LOAD, stage, micro_batch, step)
    if op in (Op.I, Op.B) and not last:
        yield Instruction(Op.RECV_GRAD, stage, micro_batch, step, plan.route[stage + 1, micro_batch])
    yield Instruction(op, stage, micro_batch, step)
    if op is Op.F and not last:
        yield Instruction(Op.SEND_ACT, stage, micro_batch, step, plan.route[stage + 1, micro_batch])
    if op in (Op.I, Op.B) and not first:
        yield Instruction(Op.SEND_GRAD, stage, micro_batch, step, plan.route[stage - 1, micro_batch])
