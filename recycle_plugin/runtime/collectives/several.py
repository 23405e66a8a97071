"""Calls of torch.distributed for several operations at once; each operation is started by itself, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from recycle_plugin.runtime.collectives.handles import BaseWork, Together

Tensors = Sequence[torch.Tensor]


class Several:
    """A process group's calls for several operations; its other part has those for one."""

    _begun: list[BaseWork] | None = None  # inside torch's coalescing manager: the calls so far

    def allreduce_coalesced(self: Any, tensors: Tensors, options: Any = None) -> dist.Work:
        """torch.distributed's ``all_reduce_coalesced``, and ``all_reduce`` in its coalescing manager."""
        return Together([self.allreduce([tensor], options) for tensor in tensors])

    def allgather_coalesced(self: Any, outputs: Sequence[Tensors], inputs: Tensors, options: Any = None) -> dist.Work:
        """torch.distributed's ``all_gather_coalesced``: ``outputs`` has a list for each member."""
        return Together(
            [self.allgather([[of_one[place] for of_one in outputs]], [own]) for place, own in enumerate(inputs)]
        )

    def all_gather_single_coalesced(self: Any, outputs: Tensors, inputs: Tensors, options: Any = None) -> dist.Work:
        """torch.distributed's ``all_gather_into_tensor`` in its coalescing manager."""
        return Together([self.all_gather_single(*each) for each in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(self: Any, outputs: Tensors, inputs: Tensors, options: Any = None) -> dist.Work:
        """torch.distributed's ``reduce_scatter_tensor`` in its coalescing manager."""
        return Together([self.reduce_scatter_single(*each, options) for each in zip(outputs, inputs, strict=True)])

    # before torch 2.13
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin torch's coalescing manager: calls up to its end are waited for together."""
        self._begun = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        begun, self._begun = self._begun, None
        assert begun is not None, "it has begun"
        return Together(begun)

    def _note(self, work: BaseWork) -> BaseWork:
        """Record a call for the coalescing manager, if one is open; returns it."""
        if self._begun is not None:
            self._begun.append(work)
        return work
