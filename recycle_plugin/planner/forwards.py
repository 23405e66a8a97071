"""Programs of an evaluation (core/worker/evaluation.py): the forwards of a batch over whoever is left.

The order of all forwards is by micro-batch, and each program is the part of it that its seat runs, so it can't
deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator

from recycle_plugin.core.vocabulary.dataflow import Datum, goes_to
from recycle_plugin.core.vocabulary.evaluation_route import readers, runner
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.planner.lower import BoundaryRoute, lower


def forwards(plan: Plan, seat: Seat, step: int, count: int) -> Iterator[Instruction]:
    """The program of ``seat`` in an evaluation of ``count`` micro-batches from each replica that can be read."""
    batch = (MicroBatch(replica, index) for index in range(count) for replica in sorted(readers(plan.view)))
    mine = (Instruction(Op.F, seat.chunk, one, step) for one in batch if runner(plan, seat.stage, one) == seat)

    def where(datum: Datum) -> BoundaryRoute:
        there = goes_to(datum, plan.stages)
        assert there is not None, f"nobody needs the {datum}"
        return BoundaryRoute(runner(plan, datum.stage, datum.made_of), runner(plan, there, datum.made_of))

    return lower(mine, plan.stages, where)
