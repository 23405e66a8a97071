"""An evaluation as programs: the forwards of a batch over whoever is left, and whose iterators it is read from.

Stock DeepSpeed reads a micro-batch twice, its inputs by the first stage's worker of the replica and its labels by the last stage's.
Each of them has read the whole batch, so where one is lost the other's serves for both; where both are, the replica's batches are
out of reach, and the evaluation is over the others.

The order of all forwards is by micro-batch, and each program is the part of it that its seat runs, so it can't deadlock.
"""

from __future__ import annotations

from typing import Iterator

from recycle_plugin.core.dataflow import Datum, goes_to
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.instruction import Instruction, Op
from recycle_plugin.core.plan import Plan
from recycle_plugin.core.topology import ClusterView
from recycle_plugin.planner.lower import Way, lower


def readers(view: ClusterView) -> dict[int, tuple[Seat, Seat]]:
    """By replica: who reads its inputs, and who its labels.  Without replicas that have lost both ends."""
    found = {}
    for replica in range(view.topology.replicas):
        ends = [Seat(replica, stage) for stage in (0, view.topology.stages - 1)]
        live = [seat for seat in ends if seat in view.live]
        if live:
            found[replica] = live[0], live[-1]
    return found


def runner(plan: Plan, stage: int, micro_batch: MicroBatch) -> Seat:
    """Who runs it; an evaluation may have more micro-batches than a step."""
    replica, index = micro_batch
    return plan.route[stage, MicroBatch(replica, index % plan.view.topology.micro_batches)]


def forwards(plan: Plan, seat: Seat, step: int, count: int) -> Iterator[Instruction]:
    """``seat``'s program of an evaluation of ``count`` micro-batches from each replica that can be read."""
    batch = (MicroBatch(replica, index) for index in range(count) for replica in sorted(readers(plan.view)))
    mine = (Instruction(Op.F, seat.stage, one, step) for one in batch if runner(plan, seat.stage, one) == seat)

    def where(datum: Datum) -> Way:
        return Way(runner(plan, datum.stage, datum.micro_batch), runner(plan, goes_to(datum, plan.stages), datum.micro_batch))

    return lower(mine, plan.stages, where)
