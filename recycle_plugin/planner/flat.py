"""The planning problem as flat integer arrays, for the scheduler's inner loops.

A *record* is one (stage, replica, micro-batch): ``(stage * ranks + rank) * micro_batches + index``, where ``rank``
numbers the replicas in canonical order. An *operation* is ``kind * records + record`` with kinds F, I, W and B (both
backwards at once). A *worker* is ``stage * ranks + rank``. Times are integer microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.planner.plan_error import PlanError
from recycle_plugin.planner.reroute import Routing

Array = NDArray[np.int64]
KINDS = (Op.F, Op.I, Op.W, Op.B)


@dataclass(frozen=True, slots=True)
class Problem:
    """The problem of scheduling one step. Arrays are int64; times are in microseconds."""

    stages: int
    micro_batches: int
    replicas: tuple[int, ...]  # in canonical order: the ranks
    split: bool  # I and W, else B
    synchronous: bool  # no stage steps before all have their gradients (Policy.together)
    cost: Array  # [kind, stage]
    reduce: Array  # [stage] the stage's own sum
    tie: Array  # [stage] the first of the stages that it shares weights with; its own number if it shares none
    tied: Array  # [stage] the sum over its tie, which begins when all of them have reduced
    step: Array  # [stage]
    cap: Array  # [stage] micro-batches that a worker may hold, from the start of their F to the end of their W or B
    communication: tuple[int, int]  # one boundary tensor: the shortest, and between replicas
    worker: Array  # [record]
    spend: Array  # [kind, worker]
    forward_lag: Array  # [record] between the end of F one stage up and the earliest start here
    backward_lag: Array  # [record] between the end of I one stage down and the earliest start here
    loads: Array  # [worker] micro-batches
    live: Array  # [worker] 1 or 0
    block: int  # micro-batches of a replica that stay together

    @property
    def ranks(self) -> int:
        return len(self.replicas)

    @property
    def closing(self) -> Array:
        """The time per stage from its last end to the end of its window, if it waits for no other stage."""
        return self.reduce + self.after

    @property
    def after(self) -> Array:
        """The time per stage from when all of its tie have reduced to the end of its window."""
        return self.tied + self.step

    def through(self, lasts: Array) -> Array:
        """Return the end of each stage's window, given when each stage's last instruction ends."""
        summed = self.summed(lasts)
        return (summed.max() if self.synchronous else summed) + self.step

    def summed(self, lasts: Array) -> Array:
        """Return when each stage has all that it steps with, if it waits for no norm. ``lasts``: its last end."""
        return met(self.tie, lasts + self.reduce) + self.tied

    @property
    def follows_in_block(self) -> NDArray[np.bool_]:
        """Whether the record before is of the same block, for each record."""
        return np.arange(self.records) % self.micro_batches % self.block > 0

    @property
    def width(self) -> int:
        return len(self.replicas) * self.micro_batches

    @property
    def records(self) -> int:
        return self.stages * self.width

    @property
    def workers(self) -> int:
        return self.stages * self.ranks


def met(tie: Array, reduced: Array) -> Array:
    """Return when all stages of each stage's tie have reduced, given when each has."""
    latest = np.zeros(len(tie), np.int64)
    np.maximum.at(latest, tie, reduced)
    return latest[tie]


def flatten(view: ClusterView, costs: CostModel, policy: Policy, routing: Routing) -> Problem:
    """Return the scheduling problem of a routed step. Raises PlanError for costs or memory that do not fit."""
    topology = view.topology
    stages, ranks, per = topology.stages, topology.replicas, topology.micro_batches
    if costs.stages != stages:
        raise PlanError(f"the cost model has {costs.stages} stages, the topology {stages}")
    reduce, step = (np.array([costs.of(op, stage) for stage in range(stages)], np.int64) for op in (Op.REDUCE, Op.STEP))
    tie = np.array([min(topology.tie(stage), default=stage) for stage in range(stages)], np.int64)
    tied = np.array([costs.of(Op.TIE, stage) if topology.tie(stage) else 0 for stage in range(stages)], np.int64)
    cost = per_stage(costs)
    worker = (routing.rank + ranks * np.arange(stages)[:, None, None]).reshape(-1).astype(np.int64)
    live = np.zeros(stages * ranks, np.int64)
    rank_of = {replica: rank for rank, replica in enumerate(routing.replicas)}
    live[[seat.stage * ranks + rank_of[seat.replica] for seat in view.live]] = 1
    forward_lag, backward_lag = lags(costs, routing.rank.reshape(stages, ranks * per))
    return Problem(
        stages,
        per,
        routing.replicas,
        policy.split_backward,
        policy.together,
        cost,
        reduce,
        tie,
        tied,
        step,
        caps(policy, stages),
        _transfers(costs),
        worker,
        spend(costs, cost, rank_of, stages, ranks),
        forward_lag,
        backward_lag,
        np.bincount(worker, minlength=stages * ranks),
        live,
        policy.blocks(topology).size,
    )


def caps(policy: Policy, stages: int) -> Array:
    """Return how many micro-batches a worker of each stage may hold. Raises PlanError for another number of stages."""
    try:
        return np.array([policy.cap(stage, stages) for stage in range(stages)], np.int64)
    except ValueError as error:
        raise PlanError(str(error)) from None


def routing_of(problem: Problem) -> Routing:
    """Return the routing in ``problem``: the given one, or as changed by a search."""
    return Routing(
        problem.replicas, (problem.worker % problem.ranks).reshape(problem.stages, problem.ranks, problem.micro_batches)
    )


def _transfers(costs: CostModel) -> tuple[int, int]:
    across = costs.communication if costs.communication_across is None else costs.communication_across
    return min(costs.communication, across), across


def per_stage(costs: CostModel) -> Array:
    return np.array([[costs.of(kind, stage) for stage in range(costs.stages)] for kind in KINDS], np.int64)


def spend(costs: CostModel, cost: Array, rank_of: Mapping[int, int], stages: int, ranks: int) -> Array:
    """Return the time per kind of operation and worker. ``cost``: per kind and stage; ``rank_of``: by replica."""
    found = np.repeat(cost, ranks, axis=1)
    for seat, _ in costs.slowness:
        if seat.replica in rank_of and seat.stage < stages:
            here = seat.stage * ranks + rank_of[seat.replica]
            found[:, here] = [costs.of(kind, seat.stage, seat) for kind in KINDS]
    return found


def lags(costs: CostModel, rank: Array) -> tuple[Array, Array]:
    """Return the time per record that its activation and its gradient travel; 0 at the pipeline's ends."""
    _, across = _transfers(costs)
    hops = np.where(rank[1:] == rank[:-1], costs.communication, across).astype(np.int64)
    ends = np.zeros((1, rank.shape[1]), np.int64)
    return np.concatenate([ends, hops]).reshape(-1), np.concatenate([hops, ends]).reshape(-1)
