"""What a worker's step needs of the framework that built its model: how gradients are summed, how a step is applied and counted, by what norm it is judged.

An adapter gives each of them.  They are functions of the framework's own, called where its own step would call them; whatever has to survive a failure is
decided around them.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Protocol, Sequence

import torch
import torch.distributed as dist

from recycle_plugin.core.ids import MicroBatch

Parameters = list[torch.nn.Parameter]
Source = Callable[[int, MicroBatch], Any]
"""Of (step, micro-batch): the batch of inputs and labels."""


class Optimizer(Protocol):
    """Applies a step once, or only counts it."""

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The one that changes the weights."""

    def apply(self) -> None:
        """... by what stands in ``parameter.grad``, clipped where the framework clips; schedulers and counters go on."""

    def skip(self) -> None:
        """Schedulers and counters go on as after a step that overflowed; no weight and no state of the optimizer changes."""


class Buckets(Protocol):
    """How the gradients of a stage's workers are summed.

    ``limit``: so many numbers end a bucket; ``averages``: whether the sum is divided by the logical number of replicas; ``group``: the stage's workers.
    """

    limit: int

    @property
    def averages(self) -> bool: ...

    @property
    def group(self) -> dist.ProcessGroup: ...

    def all_reduce(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Their sum over the group, flat, divided where ``averages``.  It may be in the memory of a single gradient, and of none of several."""

    def flatten(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor: ...

    def unflatten(self, flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]: ...


class Norm(Protocol):
    """By what a step's gradients are judged."""

    def share(self, parameters: Parameters) -> float:
        """This stage's, squared, of what ``parameter.grad`` is; all its workers find the same."""

    def total(self, shares: Mapping[str, float]) -> torch.Tensor:
        """Over all stages, from the share of each, by its number."""


class Scaler(Protocol):
    """A loss scale, and the rule by which it changes."""

    loss_scale: float

    def update_scale(self, overflow: bool) -> None:
        """A step was applied, or, on ``overflow``, skipped.  Raises where the scale can't go down any more."""
