"""Gradient sums over a stage's workers if the framework has none of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recycle_plugin.runtime.collectives.group import MemberGroup
from recycle_plugin.runtime.devices.host import CPU, on_host

BUCKET = 500_000_000  # numbers of a bucket


class MeanBuckets:
    """Average gradients over ``group``, whose size is the logical number of replicas (runtime/stage/ports.py)."""

    limit = BUCKET
    averages = True
    flatten = staticmethod(torch._utils._flatten_dense_tensors)
    unflatten = staticmethod(torch._utils._unflatten_dense_tensors)

    def __init__(self, group: MemberGroup) -> None:
        self.group = group

    def all_reduce(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the mean of ``gradients`` over the group: flat, in new memory."""
        numbers, one = sum(gradient.numel() for gradient in gradients), gradients[0]
        flat = CPU.room([numbers], one.dtype) if on_host(one) else one.new_empty(numbers)
        self.group.sum_into(flat, gradients, 1.0 / self.group.size())
        return flat
