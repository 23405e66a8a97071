"""The planning problem as flat integer arrays: what the scheduler's inner loops run on.

A *record* is one (stage, replica, micro-batch): ``(stage * replicas + rank) * micro_batches + index``,
where ``rank`` numbers the replicas in canonical order.  An *operation* is ``kind * records + record``
with kind 0 = F, 1 = I (or B where the backward is not split), 2 = W.  A *worker* is
``stage * replicas + rank``.  All times are integer microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.instruction import Op
from recycle_plugin.core.plan import Policy
from recycle_plugin.core.topology import ClusterView
from recycle_plugin.planner.errors import PlanError
from recycle_plugin.planner.reroute import canonical_replicas


@dataclass(frozen=True, slots=True)
class Problem:
    """One step to be scheduled.  Lists over operations have ``kinds * records`` entries, others one per stage or worker."""

    stages: int
    micro_batches: int
    replicas: tuple[int, ...]
    kinds: int  # 3 with a split backward, 2 without
    synchronous: bool  # all stages reduce and step together
    communication: int
    cost: tuple[tuple[int, ...], ...]  # [kind][stage]
    closing: tuple[int, ...]  # reduce and step of a stage
    joint_closing: int  # reduce and step where all stages do them together
    caps: tuple[int, ...]  # micro-batches that a worker of a stage may hold
    loads: tuple[int, ...]  # most micro-batches on one worker of a stage
    worker: list[int]  # of an operation
    duration: list[int]  # of an operation
    source: list[int]  # operation whose result an operation needs from elsewhere or from before; -1: none
    lag: list[int]  # microseconds between the source's end and the operation's earliest start

    @property
    def width(self) -> int:
        """Records per stage."""
        return len(self.replicas) * self.micro_batches

    @property
    def records(self) -> int:
        return self.stages * self.width


def flatten(view: ClusterView, costs: CostModel, policy: Policy, route: Mapping[tuple[int, MicroBatch], Seat]) -> Problem:
    """Raises PlanError where the costs are for another number of stages."""
    topology = view.topology
    stages, micro_batches, replicas = topology.stages, topology.micro_batches, canonical_replicas(view)
    if costs.stages != stages:
        raise PlanError(f"the cost model has {costs.stages} stages, the topology {stages}")
    width, records = len(replicas) * micro_batches, len(replicas) * micro_batches * stages
    kinds = (Op.F, Op.I, Op.W) if policy.split_backward else (Op.F, Op.B)
    reduce, step = ([costs.of(op, stage) for stage in range(stages)] for op in (Op.REDUCE, Op.STEP))
    cost = tuple(tuple(costs.of(kind, stage) for stage in range(stages)) for kind in kinds)
    rank = {replica: place for place, replica in enumerate(replicas)}
    owner = [
        stage * len(replicas) + rank[route[stage, MicroBatch(replica, index)].replica]
        for stage in range(stages)
        for replica in replicas
        for index in range(micro_batches)
    ]
    source = [-1] * width + list(range(records - width))
    source += list(range(records + width, 2 * records)) + list(range(records - width, records))
    lag = ([0] * width + [costs.communication] * (records - width)) + ([costs.communication] * (records - width) + [0] * width)
    if policy.split_backward:
        source += range(records, 2 * records)
        lag += [0] * records
    return Problem(
        stages,
        micro_batches,
        replicas,
        len(kinds),
        policy.validate or not policy.stagger_optimizer,
        costs.communication,
        cost,
        tuple(map(sum, zip(reduce, step))),
        max(reduce) + max(step) if policy.validate else max(map(sum, zip(reduce, step))),
        tuple(policy.cap(stage, stages) for stage in range(stages)),
        tuple(-(-width // len(view.live_replicas(stage))) for stage in range(stages)),
        owner * len(kinds),
        [microseconds for kind in cost for microseconds in kind for _ in range(width)],
        source,
        lag,
    )
