"""Alternatives to rerouting after failures, and when they would be faster.

For extra load beyond the bubbles (M >> PP) rerouting's throughput tends to min over stages of live/DP.  Dropping the
replicas that lost a worker, or building whole pipelines from all survivors, or cutting the layers anew into pipelines
of unequal depth (Oobleck, SOSP'23), may then win.  All keep the global batch.  These are predictions from the lower
bounds of each pipeline under our own schedule; what a transition costs is told as the number of workers that need
another stage's state, not in time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.planner.bounds import bound
from recycle_plugin.planner.make import prepare
from recycle_plugin.planner.plan_error import PlanError

LAYERS_A_STAGE = 8  # where the number of layers isn't told


@dataclass(frozen=True, slots=True)
class Option:
    """One way to go on after failures.  ``period_us``: predicted, at best; ``copies``: workers that need the state of
    another stage; ``idle``: live workers left out.
    """

    name: str
    period_us: int
    copies: int
    idle: int

    def __str__(self) -> str:
        return f"{self.name}: {self.period_us} us a step, {self.copies} copies of a stage, {self.idle} workers idle"


def options(view: ClusterView, costs: CostModel, policy: Policy, layers: int = 0) -> tuple[Option, ...]:
    """All ways to go on from ``view``, the fastest first; ties to the one that copies least.

    ``layers`` of the model, alike and evenly spread, for cutting it anew; 0: eight a stage.
    """
    topology, found = view.topology, []
    try:
        found.append(Option("reroute", bound(prepare(view, costs, policy)), 0, 0))
    except PlanError:
        pass  # a stage has nobody left: the others may still help
    whole = topology.replicas - len({seat.replica for seat in view.lost})
    pipelines = len(view.live) // topology.stages
    even = replace(costs, slowness=())
    if view.lost and whole:
        found.append(
            Option(
                "drop the hurt replicas",
                _even(topology, whole, even, policy),
                0,
                len(view.live) - whole * topology.stages,
            )
        )
    if view.lost and pipelines > whole and not view.empty_stages():
        moved = sum(max(0, pipelines - len(view.live_replicas(stage))) for stage in range(topology.stages))
        found.append(
            Option(
                "move workers into whole replicas",
                _even(topology, pipelines, even, policy),
                moved,
                len(view.live) - pipelines * topology.stages,
            )
        )
    if pipelines and not view.empty_stages():
        found.append(_cut_anew(view, even, policy, layers or LAYERS_A_STAGE * topology.stages))
    return tuple(sorted(found, key=lambda option: (option.period_us, option.copies)))


def _even(topology: Topology, replicas: int, costs: CostModel, policy: Policy) -> int:
    """The bound in microseconds with the batch shared by so many whole replicas."""
    each = -(-topology.replicas * topology.micro_batches // replicas)
    return bound(prepare(replace(topology, replicas=1, micro_batches=each).full(), costs, policy))


def _cut_anew(view: ClusterView, costs: CostModel, policy: Policy, layers: int) -> Option:
    """The option of pipelines of as even depths as the survivors give, each at least as deep as before, micro-batches
    to balance.
    """
    topology, workers = view.topology, len(view.live)
    total = topology.replicas * topology.micro_batches

    @cache
    def period(depth: int, micro_batches: int) -> int:
        return bound(
            prepare(Topology(1, depth, micro_batches).full(), _spread(costs, depth, layers), _roomy(policy, topology))
        )

    def most(depth: int, time_us: int) -> int:
        """Micro-batches that a pipeline of ``depth`` runs in ``time_us``."""
        low, high = 0, total
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if period(depth, middle) <= time_us else (low, middle - 1)
        return low

    best = None
    for pipelines in range(1, workers // topology.stages + 1):
        depth, deeper = divmod(workers, pipelines)
        if depth + bool(deeper) > layers:
            continue
        sizes = {depth: pipelines - deeper, depth + 1: deeper}
        low, high = 1, period(depth, -(-total // pipelines))
        while low < high:
            middle = (low + high) // 2
            enough = sum(count * most(size, middle) for size, count in sizes.items() if count) >= total
            low, high = (low, middle) if enough else (middle + 1, high)
        best = min(best or (low, pipelines), (low, pipelines))
    if best is None:
        return Option("cut the layers anew", 1 << 60, workers, 0)
    return Option("cut the layers anew", best[0], workers, 0)


def _spread(costs: CostModel, depth: int, layers: int) -> CostModel:
    """The costs of the same model in ``depth`` stages, the busiest of which has its layers rounded up."""
    share = -(-layers // depth)

    def each(values: tuple[int, ...], share: int = share) -> tuple[int, ...]:
        return (-(-sum(values) * share // layers),) * depth

    return CostModel(
        each(costs.forward),
        each(costs.input),
        each(costs.weight),
        costs.communication,
        each(costs.reduce),
        each(costs.step),
        costs.dispatch,
        each(costs.backward) if costs.backward else (),
        costs.communication_across,
    )


def _roomy(policy: Policy, topology: Topology) -> Policy:
    """The policy with the same activation cap on every stage of whatever depth."""
    return replace(
        policy,
        memory_bytes=None,
        activation_cap=max(policy.cap(stage, topology.stages) for stage in range(topology.stages)),
    )
