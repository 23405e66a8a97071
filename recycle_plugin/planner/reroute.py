"""Who runs which micro-batch: ReCycle's adaptive pipelining (SOSP'24, section 4.1).

A micro-batch stays at the seat of its own replica while that seat is live.  Otherwise a live worker
of the same stage runs it: it holds the same parameters.  Rerouted micro-batches are dealt out one by
one in the order of their index, so that every peer gets them spread over its step (all of them to
one peer: 42 slots instead of 36 in the paper's running example).
"""

from __future__ import annotations

from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.plan import Policy
from recycle_plugin.core.topology import ClusterView
from recycle_plugin.planner.errors import PlanError


def canonical_replicas(view: ClusterView) -> tuple[int, ...]:
    """Replicas, ordered by which of their seats are lost.

    Planning in this order makes a plan independent of how replicas are numbered: replicas that lost
    the same stages are interchangeable.
    """
    lost: dict[int, list[int]] = {replica: [] for replica in range(view.topology.replicas)}
    for seat in view.lost:
        lost[seat.replica].append(seat.stage)
    return tuple(sorted(lost, key=lambda replica: (lost[replica], replica)))


def route(view: ClusterView, policy: Policy) -> dict[tuple[int, MicroBatch], Seat]:
    """The seat that runs each (stage, micro-batch).

    Raises PlanError where a stage has no live worker, or where one is lost and ``policy.reroute`` is off.
    """
    _check(view, policy)
    replicas, live = canonical_replicas(view), view.live
    routed: dict[tuple[int, MicroBatch], Seat] = {}
    for stage in range(view.topology.stages):
        workers = [Seat(replica, stage) for replica in replicas if (replica, stage) in live]
        dealt = 0
        for index in range(view.topology.micro_batches):
            for replica in replicas:
                seat = Seat(replica, stage)
                if seat not in live:
                    seat = workers[dealt % len(workers)]
                    dealt += 1
                routed[stage, MicroBatch(replica, index)] = seat
    return routed


def _check(view: ClusterView, policy: Policy) -> None:
    empty = view.empty_stages()
    if empty:
        raise PlanError(
            f"stage{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty))}: no live worker left, so nobody holds its parameters; "
            "training can go on only from a checkpoint or a log"
        )
    if view.lost and not policy.reroute:
        raise PlanError(f"seats {', '.join(map(str, view.lost))} are lost and reroute is off: switch `reroute` on to go on without them")
