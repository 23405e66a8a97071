"""Predictions of how long steps take, from simulated spans."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.lab.simulator.virtual import Conditions, simulate


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted step times of a plan, in microseconds. ``period_us``: between steps' ends in the steady state.
    ``first_step_us``: from an empty pipeline to the first step's end. ``ends_us``: when all stages had stepped, by
    step.
    """

    period_us: int
    first_step_us: int
    ends_us: tuple[int, ...]


def predict(plan: Plan, costs: CostModel, steps: int = 6, conditions: Conditions = Conditions()) -> Prediction:
    """Return a plan's step times, from ``steps`` simulated ones; the period is the mean of the later half, rounded up.
    ValueError for fewer than 2 steps, and Deadlock.
    """
    if steps < 2:
        raise ValueError(f"steps is {steps}: a period needs at least 2")
    ends = step_ends(simulate(plan, costs, steps, conditions))
    since = (steps - 1) // 2
    period = -(-(ends[-1] - ends[since]) // (steps - 1 - since))
    return Prediction(period, ends[0], ends)


def step_ends(spans: list[Span]) -> tuple[int, ...]:
    """Return when the last stage has stepped, per step, in microseconds."""
    ends: dict[int, int] = {}
    for span in spans:
        if span.instruction.op is Op.STEP:
            step = span.instruction.step
            ends[step] = max(ends.get(step, 0), span.end_us)
    return tuple(ends[step] for step in sorted(ends))
