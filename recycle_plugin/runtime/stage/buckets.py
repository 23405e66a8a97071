"""How the gradients of a stage's workers are summed where no framework does it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

BUCKET = 500_000_000  # numbers


class MeanBuckets:
    """Averages gradients over ``group``, whose size is the logical number of replicas (runtime/worker/ports.py)."""

    limit = BUCKET
    averages = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The flat mean of ``gradients`` over the group."""
        flat = self.flatten(gradients)
        dist.all_reduce(flat, group=self.group)
        return flat.mul_(1.0 / self.group.size())

    def flatten(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One flat tensor that has all elements of ``tensors``."""
        return torch._utils._flatten_dense_tensors(tensors)

    def unflatten(self, flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The parts of a flat tensor, in the shapes of ``like``."""
        return torch._utils._unflatten_dense_tensors(flat, like)
