"""The line of stages for planner/log_selection.py: by an earlier run's costs, or as its workers have measured it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.log_figures import StageFigures
from recycle_plugin.core.vocabulary.stage_bytes import StageBytes
from recycle_plugin.planner.log_selection import Line

STORAGE_BYTES_PER_S = 1e9  # assumed, for checkpoints and logs that a worker reads
ENOUGH = 3  # steps that every worker must have measured


def expected(
    costs: CostModel, memory: Sequence[StageBytes], split: bool, batch: int, hosts: Sequence[str], every: int
) -> Line:
    """Return the line by ``costs`` and the measured ``memory`` of each stage, for steps of which the busiest worker
    makes ``batch`` micro-batches. Without ``memory`` nothing is read.
    """
    stages = costs.stages
    return Line(
        recompute_s=tuple(costs.alone_s(stage, split, batch) for stage in range(stages)),
        boundary_bytes=crossing_bytes(memory, batch) or (0,) * (stages - 1),
        failure=(1 / stages,) * stages,
        hosts=tuple(hosts),
        load_s=max((each.state for each in memory), default=0) / STORAGE_BYTES_PER_S,
        every=every,
        network_bytes_per_s=STORAGE_BYTES_PER_S,
        read_bytes_per_s=STORAGE_BYTES_PER_S,
    )


def crossing_bytes(memory: Sequence[StageBytes], batch: int) -> tuple[int, ...]:
    """Return the bytes that cross each boundary in a step of ``batch`` micro-batches, both ways."""
    return tuple(2 * batch * each.boundary for each in memory[:-1])


def measured(figures: Collection[StageFigures], hosts: Sequence[str], every: int) -> Line | None:
    """Return the line as the live workers have measured it, in any order; None for too few steps. A stage's work, and
    what crosses a boundary, is the sum of its workers' shares, whoever they are.
    """
    if not figures or min(each.figures.steps for each in figures) < ENOUGH:
        return None
    stages = len(hosts)
    work, crossing = [0.0] * stages, [0.0] * (stages + 1)
    for stage, _, (steps, computed, down, up, _) in sorted(figures):
        work[stage] += computed / steps
        crossing[stage] += up / steps
        crossing[stage + 1] += down / steps
    return Line(
        recompute_s=tuple(work),
        boundary_bytes=tuple(round(each) for each in crossing[1:-1]),
        failure=(1 / stages,) * stages,
        hosts=tuple(hosts),
        load_s=max(each.state_bytes for each in figures) / STORAGE_BYTES_PER_S,
        every=every,
        network_bytes_per_s=STORAGE_BYTES_PER_S,
        read_bytes_per_s=STORAGE_BYTES_PER_S,
    )
