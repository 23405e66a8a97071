"""DeepSpeed's own 1F1B order (``deepspeed.runtime.pipe.schedule.TrainSchedule``), by its rule.

A stage runs one forward for every stage from itself to the end, then backwards and forwards in turn.
In TrainSchedule's clock stage p runs forward m in slot 2m + p and backward m in slot 2(P + m) - p - 1.
"""

from __future__ import annotations

from recycle_plugin.planner.flat import Problem


def fits(problem: Problem) -> bool:
    """Whether 1F1B's activations stay under the caps."""
    return all(min(problem.stages - stage, problem.micro_batches) <= problem.caps[stage] for stage in range(problem.stages))


def one_f_one_b(problem: Problem) -> list[int]:
    """All operations (F and B) in one global order; every replica runs its own micro-batches."""
    stages, width, records = problem.stages, problem.width, problem.records
    slots = []
    for record in range(records):
        stage, index = record // width, record % problem.micro_batches
        slots.append((2 * index + stage, record))
        slots.append((2 * (stages + index) - stage - 1, records + record))
    return [operation for _, operation in sorted(slots)]
