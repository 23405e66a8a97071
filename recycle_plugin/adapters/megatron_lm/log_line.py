"""The values of Megatron-LM's log line, from what the loss function returns for each micro-batch.

They are added up as stock's step and evaluation do. A value of one number: stock logs the mean over its last replica's
micro-batches, since that replica's rank prints. A value of a sum and a count: stock adds both up over all micro-batches
of all replicas, and divides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.ports import Told

Sums = dict[str, torch.Tensor]
"""By name: a numerator and a denominator, fp32."""
Numbers = list[tuple[float, ...]]


@torch.no_grad()
def told(loss: torch.Tensor, values: Any) -> Told:
    """Return the numbers of a micro-batch that all workers get: its ``loss``, and the loss function's ``values``."""
    if not isinstance(values, dict):
        raise RecycleError(
            "the loss function gives no dict of what is logged: return (loss, tokens, {'lm loss': …}), as "
            "pretrain_gpt.py does"
        )
    for name, value in values.items():
        if not torch.is_tensor(value) or value.numel() not in (1, 2):
            shape = tuple(value.shape) if torch.is_tensor(value) else type(value).__name__
            raise RecycleError(
                f"the loss function's value {name!r} is logged, and is {shape}: give a tensor with one number, or with "
                "a sum and a count"
            )
    flat = [each.detach().reshape(-1).double() for each in (loss, *values.values())]
    return torch.cat(flat), {name: value.numel() for name, value in values.items()}


def sums(losses: Mapping[str, Loss]) -> Sums:
    """Return the numerator and denominator of each value over the micro-batches of a step or an evaluation."""
    found: dict[str, dict[int, Numbers]] = {}
    for micro_batch, loss in sorted((MicroBatch.parse(name), loss) for name, loss in losses.items()):
        for name, numbers in {} if isinstance(loss, float | int) else loss[1].items():
            found.setdefault(name, {}).setdefault(micro_batch.replica, []).append(numbers)
    return {name: _added(by_replica) for name, by_replica in found.items()}


def _added(by_replica: Mapping[int, Numbers]) -> torch.Tensor:
    each = {replica: torch.tensor(numbers, dtype=torch.float32) for replica, numbers in by_replica.items()}
    last = each[max(each)]
    if last.shape[1] == 1:
        return torch.stack([last.flatten().sum(), torch.tensor(float(len(last)))])
    total, *rest = (numbers.sum(dim=0) for numbers in each.values())
    return sum(rest, total)


def quotients(of: Sums) -> dict[str, torch.Tensor]:
    """Return the values to log."""
    return {name: numerator / denominator for name, (numerator, denominator) in of.items()}
