"""Who reads, and who runs, the micro-batches of an evaluation (core/worker/evaluation.py), whoever is left."""

from __future__ import annotations

from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.topology import ClusterView


def readers(view: ClusterView) -> dict[int, tuple[Seat, Seat]]:
    """By replica: who reads its inputs, and who its labels.

    Without replicas that have lost both ends.  Costs time in proportion to the replicas.
    """
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
