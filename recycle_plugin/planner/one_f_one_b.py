"""DeepSpeed's own 1F1B order (``deepspeed.runtime.pipe.schedule.TrainSchedule``), by its rule.

A stage runs one forward for every stage from itself to the end, then backwards and forwards in turn. In TrainSchedule's
clock stage p runs forward m in slot 2m + p and backward m in slot 2(P + m) - p - 1.
"""

from __future__ import annotations

import numpy as np

from recycle_plugin.planner.flat import Array, Problem


def fits(problem: Problem) -> bool:
    """Return whether every worker runs its own replica's micro-batches and 1F1B's activations stay under the caps."""
    at_home = np.array_equal(problem.worker, np.arange(problem.records) // problem.micro_batches)
    depth = np.minimum(problem.stages - np.arange(problem.stages), problem.micro_batches)
    return at_home and bool((depth <= problem.cap).all())


def one_f_one_b(problem: Problem) -> Array:
    """Return all operations (F and B) in one global order, int64; every replica runs its own micro-batches."""
    records = np.arange(problem.records)
    stage, index = records // problem.width, records % problem.micro_batches
    slots = np.concatenate([2 * index + stage, 2 * (problem.stages + index) - stage - 1])
    operations = np.concatenate([records, 3 * problem.records + records])
    return operations[np.lexsort((operations, slots))]
