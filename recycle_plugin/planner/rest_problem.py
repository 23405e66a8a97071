"""The rest of a step (planner/closure.py), as the problem that :mod:`planner.recovery_order` solves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.planner.closure import Rest
from recycle_plugin.planner.flat import KINDS, caps, lags, per_stage, spend
from recycle_plugin.planner.recovery_order import RestProblem

Array = NDArray[np.int64]
Mask = NDArray[np.bool_]


def rest_problem(rest: Rest, plan: Plan, costs: CostModel) -> RestProblem:
    """Return the problem of putting ``rest`` in order."""
    shape = plan.view.topology
    stages, width = rest.home.shape
    column = np.arange(width)
    worker = (rest.home + shape.replicas * np.arange(stages)[:, None]).reshape(-1)
    in_turn = _in_turn(rest, column % shape.micro_batches % plan.policy.blocks(shape).size > 0)
    held = rest.holds["stash"] + rest.holds["inner"]
    return RestProblem(
        width,
        shape.replicas,
        worker,
        _missing(rest, in_turn),
        _since(rest, costs),
        *lags(costs, rest.home),
        np.roll(in_turn, -1, axis=1).reshape(-1),
        rest.forward_only.reshape(-1),
        rest.boundary.reshape(-1),
        column % shape.micro_batches * shape.replicas + column // shape.micro_batches,
        spend(costs, per_stage(costs), {each: each for each in range(shape.replicas)}, stages, shape.replicas),
        (caps(plan.policy, stages)[:, None] - held).reshape(-1),
        np.bincount(worker, minlength=stages * shape.replicas),
    )


def _in_turn(rest: Rest, follows: Mask) -> Mask:
    """Return whose weight gradient is added after that of the previous column, which is made again too. ``follows``: by
    column, whether the previous column is of the same block.
    """
    runs = rest.runs(Op.W) | rest.runs(Op.B)
    before = np.concatenate([np.zeros((len(runs), 1), bool), runs[:, :-1]], axis=1)
    return runs & before & follows


def _missing(rest: Rest, in_turn: Mask) -> NDArray[np.int8]:
    """Return per kind and record how many of its inputs are made again; -1 if it does not run."""
    missing = np.full((len(KINDS), *rest.home.shape), -1, np.int8)
    activation, gradient = (np.zeros(rest.home.shape, np.int8) for _ in range(2))
    activation[1:], gradient[:-1] = rest.forward[:-1], rest.backward[1:]
    backward = gradient + rest.forward
    needs = (activation, backward, rest.runs(Op.I).astype(np.int8) + in_turn, backward + in_turn)
    for kind, (op, count) in enumerate(zip(KINDS, needs)):
        np.copyto(missing[kind], count, where=rest.runs(op))
    return missing.reshape(len(KINDS), -1)


def _since(rest: Rest, costs: CostModel) -> Array:
    """Return per record when an activation, and when a gradient arrives that its holder has from before, and sends at
    once.
    """
    since = np.zeros((2, *rest.home.shape), np.int64)
    across = costs.communication if costs.communication_across is None else costs.communication_across
    ways = (("act", slice(1, None), slice(None, -1)), ("grad", slice(None, -1), slice(1, None)))
    for row, (kind, user, maker) in enumerate(ways):
        kept = rest.kept[kind][maker]
        takes = np.where(kept == rest.home[user], costs.communication, across)
        np.copyto(since[row][user], takes, where=rest.sent[kind][maker] & (kept >= 0))
    return since.reshape(2, -1)
