"""The routing of an evaluation (core/worker/evaluation.py): which live seats read its micro-batches, which run them."""

from __future__ import annotations

from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.topology import ClusterView


def readers(view: ClusterView) -> dict[int, tuple[Seat, Seat]]:
    """Return for each replica the seats that read its inputs and its labels: its first and last stage, or for both the
    live one. Replicas that have lost both ends are left out.
    """
    found = {}
    for replica in range(view.topology.replicas):
        ends = [Seat(replica, stage) for stage in (0, view.topology.stages - 1)]
        live = [seat for seat in ends if seat in view.live]
        if live:
            found[replica] = live[0], live[-1]
    return found


def runner(plan: Plan, stage: int, micro_batch: MicroBatch) -> Seat:
    """Return the seat that runs ``micro_batch`` of an evaluation on ``stage``. An evaluation may have more
    micro-batches than a step; the further ones are routed like the step's, in turn.
    """
    replica, index = micro_batch
    return plan.route[stage, MicroBatch(replica, index % plan.view.topology.micro_batches)]
