"""What is left of a step (planner/closure.py), as the problem that :mod:`planner.recovery_order` solves."""

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
    nothing = np.zeros(rest.home.shape, bool)
    return RestProblem(
        width,
        shape.replicas,
        worker,
        _missing(rest, in_turn),
        _since(rest, costs),
        *lags(costs, rest.home),
        np.roll(in_turn, -1, axis=1).reshape(-1).astype(np.int64),
        _by_kind(rest.forward_only, rest.boundary, nothing, nothing),
        np.tile(column % shape.micro_batches * shape.replicas + column // shape.micro_batches, stages),
        spend(costs, per_stage(costs), {each: each for each in range(shape.replicas)}, stages, shape.replicas),
        (caps(plan.policy, stages)[:, None] - held).reshape(-1),
        np.bincount(worker, minlength=stages * shape.replicas),
    )


def _in_turn(rest: Rest, follows: Mask) -> Mask:
    """Return whose weight gradient is added behind that of the column before, which is made again too. ``follows``: per
    column, whether the one before is of the same block.
    """
    runs = rest.runs(Op.W) | rest.runs(Op.B)
    before = np.concatenate([np.zeros((len(runs), 1), bool), runs[:, :-1]], axis=1)
    return runs & before & follows


def _missing(rest: Rest, in_turn: Mask) -> Array:
    """Return per kind and record how many of its inputs are made again; -1 if it does not run."""
    first, last = np.zeros((1, rest.home.shape[1]), bool), np.zeros((1, rest.home.shape[1]), bool)
    activation = np.concatenate([first, rest.forward[:-1]])
    gradient = np.concatenate([rest.backward[1:], last])
    backward = rest.forward.astype(np.int64) + gradient
    needs = (activation.astype(np.int64), backward, rest.runs(Op.I) + in_turn.astype(np.int64), backward + in_turn)
    return _by_kind(*(np.where(rest.runs(op), count, -1) for op, count in zip(KINDS, needs)))


def _since(rest: Rest, costs: CostModel) -> Array:
    """Return per kind and record when a boundary tensor arrives that its holder has from before, and sends at once."""
    since = {kind: np.zeros(rest.home.shape, np.int64) for kind in rest.sent}
    across = costs.communication if costs.communication_across is None else costs.communication_across
    for kind, user, maker in (("act", slice(1, None), slice(None, -1)), ("grad", slice(None, -1), slice(1, None))):
        kept = rest.kept[kind][maker]
        takes = np.where(kept == rest.home[user], costs.communication, across)
        since[kind][user] = np.where(rest.sent[kind][maker] & (kept >= 0), takes, 0)
    return _by_kind(since["act"], since["grad"], np.zeros(rest.home.shape, np.int64), since["grad"])


def _by_kind(*arrays: NDArray) -> Array:
    return np.stack([array.reshape(-1) for array in arrays]).astype(np.int64)
