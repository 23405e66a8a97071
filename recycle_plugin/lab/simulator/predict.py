"""Predictions of how long steps take, from simulated spans."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.lab.simulator.virtual import simulate


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted step times of a plan, in microseconds. ``period_us``: between steps' ends in the steady state.
    ``first_step_us``: from an empty pipeline to the first step's end.
    """

    period_us: int
    first_step_us: int


def predict(plan: Plan, costs: CostModel, steps: int = 6) -> Prediction:
    """Return a plan's step times, from ``steps`` simulated ones; the period is the mean of the later half, rounded up.
    ValueError for fewer than 2 steps, and Deadlock.
    """
    if steps < 2:
        raise ValueError(f"steps is {steps}: a period needs at least 2")
    applied = [span for span in simulate(plan, costs, steps) if span.instruction.op is Op.STEP]
    by_step = {span.instruction.step: span.end_us for span in sorted(applied, key=lambda span: span.end_us)}
    ends, since = [by_step[step] for step in sorted(by_step)], (steps - 1) // 2
    return Prediction(-(-(ends[-1] - ends[since]) // (steps - 1 - since)), ends[0])
