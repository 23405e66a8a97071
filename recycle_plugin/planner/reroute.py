"""Rerouting, who runs which micro-batch: ReCycle's adaptive pipelining (SOSP'24, section 4.1).

A micro-batch stays at the seat of its own replica while that seat is live. Otherwise a live worker of the same stage
runs it, which holds the same parameters. Rerouted micro-batches are dealt one by one in the order of their index, so
that every peer gets them spread over its step (all to one peer: 42 slots instead of 36 in the paper's running example).

If workers differ in speed, a stage's micro-batches are shared so that its slowest worker ends earliest. A straggler
keeps fewer than its replica brings, and gives the others away as a lost worker does, at even distances.

If the policy keeps micro-batches together (core/vocabulary/blocks.py), all of this is done with whole blocks.
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.program import Route
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.planner.plan_error import PlanError


class Routing(NamedTuple):
    """``rank[stage, rank, index]``, int64: the rank that runs a micro-batch. ``replicas``: by rank, canonical order."""

    replicas: tuple[int, ...]
    rank: NDArray[np.int64]

    def named(self, view: ClusterView) -> Route:
        """Return the same routing by replica numbers."""
        names = np.array(self.replicas, np.int32)
        by_replica = np.empty(self.rank.shape, np.int32)
        by_replica[:, names] = names[self.rank]
        return Route(view.topology, by_replica.tobytes())


def canonical_replicas(view: ClusterView, costs: CostModel | None = None) -> tuple[int, ...]:
    """Return the replicas, ordered by which of their seats are lost, then by which are slow. Planning in this order
    makes a plan independent of how replicas are numbered: replicas that lost the same stages are interchangeable.
    """
    marks: dict[int, list[tuple[int, int]]] = {replica: [] for replica in range(view.topology.replicas)}
    for seat in view.lost:
        marks[seat.replica].append((seat.stage, 0))
    for seat, percent in sorted(costs.slowness) if costs is not None else ():
        if seat in view.live and percent != 100:
            marks[seat.replica].append((view.topology.stages + seat.stage, percent))
    return tuple(sorted(marks, key=lambda replica: (marks[replica], replica)))


def route(view: ClusterView, policy: Policy, costs: CostModel | None = None) -> Routing:
    """Return the routing of a step's micro-batches over the live seats of ``view``. Raises PlanError if a stage has no
    live worker, or if one is lost and ``policy.reroute`` is off.
    """
    _check(view, policy)
    topology = view.topology
    replicas = canonical_replicas(view, costs)
    rank_of = {replica: rank for rank, replica in enumerate(replicas)}
    home = np.arange(len(replicas))[:, None]
    block = np.arange(topology.micro_batches) // policy.blocks(topology).size  # of each index
    rank = np.broadcast_to(home, (topology.stages, len(replicas), block[-1] + 1)).astype(np.int64)
    for stage in range(topology.stages):
        workers = sorted(rank_of[replica] for replica in view.live_replicas(stage))
        percents = [costs.percent(Seat(replicas[worker], stage)) if costs is not None else 100 for worker in workers]
        if len(set(percents)) > 1 and policy.reroute:
            _share(rank[stage], workers, percents)
        elif len(workers) < len(replicas):
            _deal(rank[stage], workers)
    return Routing(replicas, rank[:, :, block])


def _deal(rank: NDArray[np.int64], workers: list[int]) -> None:
    """Give the lost workers' blocks to ``workers`` in turn."""
    lost = np.setdiff1d(np.arange(len(rank)), workers)
    number = np.arange(rank.shape[1] * len(lost)).reshape(rank.shape[1], len(lost))
    rank[lost] = np.array(workers)[number % len(workers)].T


def shares(total: int, percents: list[int]) -> list[int]:
    """Return how many of ``total`` equal blocks each worker takes to end earliest together; ties go to the first."""
    heap = [(percent, place) for place, percent in enumerate(percents)]
    heapify(heap)
    taken = [0] * len(percents)
    for _ in range(total):
        end, place = heap[0]
        taken[place] += 1
        heapreplace(heap, (end + percents[place], place))
    return taken


def _share(rank: NDArray[np.int64], workers: list[int], percents: list[int]) -> None:
    """Let each worker keep its own up to its share; deal the rest to those below theirs, in the blocks' order."""
    own, total = rank.shape[1], rank.size
    share = dict(zip(workers, shares(total, percents)))
    wanting = {worker: share[worker] - min(own, share[worker]) for worker in workers}
    turn: list[int] = []
    loose: list[tuple[int, int]] = []
    for index in range(own):
        for home in range(len(rank)):
            kept = min(own, share.get(home, 0))
            if (index + 1) * kept // own == index * kept // own:
                loose.append((index, home))
    while len(turn) < len(loose):
        turn += [worker for worker in workers if wanting[worker] > 0]
        wanting = {worker: left - 1 for worker, left in wanting.items()}
    for (index, home), worker in zip(loose, turn):
        rank[home, index] = worker


def _check(view: ClusterView, policy: Policy) -> None:
    empty = view.empty_stages()
    if empty:
        raise PlanError(
            f"stage{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty))}: no live worker left, so nobody holds "
            "its parameters; "
            "training can go on only from a checkpoint or a log"
        )
    if view.lost and not policy.reroute:
        raise PlanError(
            f"seats {', '.join(map(str, view.lost))} are lost and reroute is off: switch `reroute` on to go on without "
            "them"
        )
