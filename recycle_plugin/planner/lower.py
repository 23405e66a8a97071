"""Lowering, from computation to a worker's program: LOAD and transport are added by the dataflow. The only lowering: of
a plan's step, of the rest of a step after a failure (planner/recovery.py), and of an evaluation (planner/forwards.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from recycle_plugin.core.vocabulary.dataflow import TRAVELS, Datum, goes_to, provides, requires
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Plan


class BoundaryRoute(NamedTuple):
    """The route of a boundary tensor: the seat that has it, and the seat that its maker sends it to; None: no seat."""

    source: Seat
    target: Seat | None


def lower(
    compute: Iterable[Instruction], stages: int, where: Callable[[Datum], BoundaryRoute]
) -> Iterator[Instruction]:
    """Yield the program of one seat that computes ``compute`` (F, I, W and B), with RECV and LOAD right before their
    consumer and SEND right after the producer. The first of ``stages`` stages loads inputs, the last one labels, a job
    of one stage both at once. ``where``: the way of an activation or a gradient that crosses stages.
    """
    for one in compute:
        for datum in requires(one, stages):
            if datum.kind == "data":
                yield Instruction(Op.LOAD, one.stage, one.micro_batch, one.step)
            elif datum.kind in TRAVELS:
                yield receive(datum, one.stage, where(datum).source)
        yield one
        for datum in provides(one):
            if datum.kind in TRAVELS and goes_to(datum, stages) is not None:
                target = where(datum).target
                if target is not None:
                    yield send(datum, target)


def receive(datum: Datum, stage: int, source: Seat) -> Instruction:
    """Return the instruction that receives a boundary tensor for ``stage`` from ``source``."""
    return Instruction(
        Op.RECV_ACT if datum.kind == "act" else Op.RECV_GRAD, stage, datum.micro_batch, datum.step, source
    )


def send(datum: Datum, target: Seat) -> Instruction:
    """Return the instruction that sends one's own boundary tensor to ``target``."""
    return Instruction(
        Op.SEND_ACT if datum.kind == "act" else Op.SEND_GRAD, datum.stage, datum.micro_batch, datum.step, target
    )


def lowered(plan: Plan, seat: Seat, step: int) -> tuple[Instruction, ...]:
    """Return the program that ``seat`` executes in ``step`` by ``plan``. Raises KeyError for an unknown seat."""
    return tuple([one.at(step) for one in _template(plan, seat)])


def _template(plan: Plan, seat: Seat) -> tuple[Instruction, ...]:
    """Return the program in step 0, made once for a plan and a seat."""
    kept = plan.templates.get(seat)
    if kept is not None:
        return kept

    def where(datum: Datum) -> BoundaryRoute:
        stage = goes_to(datum, plan.stages)
        assert stage is not None, f"nobody needs the {datum}"
        return BoundaryRoute(plan.route[datum.stage, datum.made_of], plan.route[stage, datum.made_of])

    made = plan.templates[seat] = tuple(lower(plan.programs[seat], plan.stages, where))
    return made
