"""What plain torch lends the trainer (runtime/worker/ports.py): its sum of gradients, its optimizer's step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from recycle_plugin.runtime.state.stage_state import StatePart

BUCKET = 500_000_000  # numbers


class PlainBuckets:
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


class PlainOptimizer:
    """Steps the torch optimizer ``wrapped``, with its learning-rate ``scheduler``, if it has one.

    ``clip()`` clips what is in ``parameter.grad``.
    """

    def __init__(self, wrapped: torch.optim.Optimizer, scheduler: Any, clip: Callable[[], None]) -> None:
        self.wrapped, self.scheduler, self._clip = wrapped, scheduler, clip
        self.steps, self.skipped = 0, 0

    def apply(self) -> None:
        """Clip, step optimizer and scheduler, and count."""
        self._clip()
        self.wrapped.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.steps += 1

    def pass_over(self) -> None:
        """Count a step that is over, and step the scheduler, as if no step had been skipped; no weight changes."""
        if self.scheduler is not None:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch misses the optimizer's step
                self.scheduler.step()
        self.steps += 1

    def skip(self) -> None:
        """Count a step that is not applied; the scheduler waits for one that is."""
        self.steps += 1
        self.skipped += 1

    @property
    def counters(self) -> StatePart:
        """The part of a stage's state that is the counts of steps."""
        return StatePart("counters", get=lambda: {"steps": self.steps, "skipped": self.skipped}, set=self._count)

    def _count(self, counts: Mapping[str, int]) -> None:
        self.steps, self.skipped = counts["steps"], counts["skipped"]
