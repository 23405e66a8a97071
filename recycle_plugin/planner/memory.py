"""The memory model: how much a worker may hold, and what a micro-batch holds.

A micro-batch holds its activations from the start of its F to the end of its I or B. After an I it holds what the
weight gradient needs, until the end of its W. In micro-batches both count 1 (no part is dropped before W). In bytes
they are ``CostModel.activation_bytes`` and ``pending_bytes``. The second may be smaller (what only I needs goes) or
larger (activation checkpointing: what I has recomputed stays until W). Neither includes an instruction's working
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.planner.plan_error import PlanError

RESERVE = 0.05  # the share of a device that stays free for fragmentation


class StageMemory(NamedTuple):
    """The memory per stage, int64: what a worker may hold, what an activation holds, and what a pending W holds."""

    cap: NDArray[np.int64]
    activation: NDArray[np.int64]
    pending: NDArray[np.int64]


def memory(costs: CostModel, policy: Policy) -> StageMemory:
    """Return the memory of each stage, in bytes if the policy says so, else in micro-batches. Raises PlanError if a
    worker can't hold one micro-batch, or the costs have no bytes.
    """
    stages = costs.stages
    if policy.memory_bytes is None:
        ones = np.ones(stages, np.int64)
        try:
            return StageMemory(np.array([policy.cap(stage, stages) for stage in range(stages)], np.int64), ones, ones)
        except ValueError as error:
            raise PlanError(str(error)) from None
    if not costs.activation_bytes:
        raise PlanError(
            "memory_bytes needs costs with activation_bytes: profile the model, or give activation_cap instead"
        )
    cap = np.broadcast_to(np.array(policy.memory_bytes, np.int64), (stages,)).copy()
    activation = np.array(costs.activation_bytes, np.int64)
    pending = np.array(costs.pending_bytes or costs.activation_bytes, np.int64)
    if not policy.split_backward:
        pending = np.zeros(stages, np.int64)
    least = np.maximum(activation, pending) if policy.split_backward else activation
    for stage in range(stages):
        if cap[stage] < least[stage]:
            raise PlanError(
                f"stage {stage} may hold {cap[stage]} bytes, one micro-batch takes {least[stage]}: raise the "
                "activation cap"
            )
    return StageMemory(cap, activation, pending)


def auto(device_bytes: int, state_bytes: Sequence[int], working_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the ``Policy.memory_bytes`` that a memory profile allows, per stage. ``state_bytes``: what is held beside
    activations while gradients are computed (core/vocabulary/worker_bytes.py); ``working_bytes``: the most that one
    running instruction needs on top. Raises PlanError if nothing is left.
    """
    left = tuple(
        int(device_bytes * (1 - RESERVE)) - state - working
        for state, working in zip(state_bytes, working_bytes, strict=True)
    )
    for stage, free in enumerate(left):
        if free <= 0:
            raise PlanError(
                f"stage {stage}: model state and working memory leave {free} of {device_bytes} bytes for activations"
            )
    return left
