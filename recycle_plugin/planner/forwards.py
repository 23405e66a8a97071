"""Programs of an evaluation (core/worker/evaluation.py): the forwards of a batch over the live seats. All forwards are
ordered by micro-batch, and each program is its seat's part of that order, so it can't deadlock.
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
    """Yield the program of ``seat`` in an evaluation of ``count`` micro-batches from each readable replica."""
    batch = (MicroBatch(replica, index) for index in range(count) for replica in sorted(readers(plan.view)))
    mine = (Instruction(Op.F, seat.chunk, one, step) for one in batch if runner(plan, seat.stage, one) == seat)

    def where(datum: Datum) -> BoundaryRoute:
        there = goes_to(datum, plan.stages)
        assert there is not None, f"nobody needs the {datum}"
        return BoundaryRoute(runner(plan, datum.stage, datum.made_of), runner(plan, there, datum.made_of))

    return lower(mine, plan.stages, where)
