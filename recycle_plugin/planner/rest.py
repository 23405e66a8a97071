"""In what order a worker runs its part of a :class:`core.lineage.Rest`.

The plan of the step has one global order of all its operations, by planned start.  What is left of a step keeps that order,
whoever runs it now; every worker's program is a projection of it, so programs can't deadlock, and a worker needs to work out
only its own.
"""

from __future__ import annotations

from typing import Iterator

from recycle_plugin.core.dataflow import Datum, provides, requires
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.instruction import Instruction, Op
from recycle_plugin.core.lineage import Rest
from recycle_plugin.core.plan import Plan

Starts = dict[tuple[Op, MicroBatch], int]
KINDS = {Op.F: 0, Op.I: 1, Op.B: 1, Op.W: 2}  # of operations that start together, because some of them cost nothing


def arrange(rest: Rest, plan: Plan, seat: Seat) -> tuple[Instruction, ...]:
    """``seat``'s program of the rest: first what it keeps for others, then what it computes, then the closing.

    LOAD and RECV stand before their consumer and SEND behind the producer, as in ``planner.lower``.
    """
    starts = _starts(plan, seat.stage)
    program = [_send(datum, move.target) for datum, move in sorted(rest.moves.items()) if move.kept and move.source == seat]
    for one in sorted(rest.compute[seat], key=lambda one: (starts[one.op, one.micro_batch], KINDS[one.op], one.micro_batch)):
        program += _surround(rest, plan, seat, one)
    return (*program, *rest.closing[seat])


def _starts(plan: Plan, stage: int) -> Starts:
    """Planned starts of one stage's operations; where a backward is planned in one piece, both halves have its start."""
    found: Starts = {}
    for seat in plan.view.live:
        if seat.stage == stage:
            for one, start in zip(plan.programs[seat], plan.starts[seat]):
                if one.op in KINDS:
                    found[one.op, one.micro_batch] = start
                if one.op is Op.B:
                    found[Op.I, one.micro_batch] = found[Op.W, one.micro_batch] = start
    return found


def _surround(rest: Rest, plan: Plan, seat: Seat, one: Instruction) -> Iterator[Instruction]:
    for datum in requires(one, plan.stages):
        if datum.kind == "data":
            yield Instruction(Op.LOAD, one.stage, one.micro_batch, one.step)
        elif datum.kind in ("act", "grad"):
            move = rest.moves.get(datum)
            source = move.source if move else plan.route[datum.stage, datum.micro_batch]
            yield Instruction(Op.RECV_ACT if datum.kind == "act" else Op.RECV_GRAD, one.stage, one.micro_batch, one.step, source)
    yield one
    for datum in provides(one):
        move = rest.moves.get(datum)
        if move and not move.kept and move.source == seat:
            yield _send(datum, move.target)


def _send(datum: Datum, target: Seat) -> Instruction:
    return Instruction(Op.SEND_ACT if datum.kind == "act" else Op.SEND_GRAD, datum.stage, datum.micro_batch, datum.step, target)
