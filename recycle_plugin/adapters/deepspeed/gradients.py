"""A stage's gradients, from contributions in ``parameter.grad`` (in exact mode, in sums of blocks) over their sum to the commit of the step.

The sum stands in second buffers until every bucket is done, so an interrupted one leaves the contributions as they were;
and it is kept until the step is committed, since a peer may lack it, or this worker may have to apply it once more.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE

from recycle_plugin.core.blocks import Block
from recycle_plugin.runtime.blocks import BlockSums, in_place_of

READ_ONLY = (torch.optim.Adam, torch.optim.AdamW)  # known to leave gradients as they are; Nesterov's foreach form does not
EXACT_BUCKET = 1 << 22  # numbers
Parameters = list[torch.nn.Parameter]


class Gradients:
    """Of ``parameters``, summed by ``engine``, DeepSpeed's, or from ``blocks``: in buckets, averaged by the logical number of replicas."""

    def __init__(self, engine: Any, parameters: Parameters, blocks: BlockSums | None) -> None:
        self._engine = engine
        self._parameters = parameters
        self._places = {parameter: place for place, parameter in enumerate(parameters)}
        self._blocks = blocks
        self._whole: dict[int, list[torch.Tensor]] = {}  # by step

    def steps(self) -> tuple[int, ...]:
        """Whose sums are here."""
        return tuple(self._whole)

    def drop(self, step: int) -> None:
        """``step`` is committed."""
        self._whole = {each: gradients for each, gradients in self._whole.items() if each > step}

    def void(self, after: int) -> None:
        """Neither contributions to the steps after ``after`` nor their sums count.  Where ``after`` was not summed yet, there are none."""
        if after in self._whole:
            self._whole = {each: gradients for each, gradients in self._whole.items() if each <= after}
            self._put([None] * len(self._parameters))

    def reduce(self, step: int, holder: int | None) -> bool:
        """Sum the stage's contributions, or take the sum from the live worker of rank ``holder``; whether there were any here."""
        owners = self._blocks.owners(self._group) if self._blocks is not None and holder is None else None
        reduced = [(bucket, self._sum(bucket, step, holder, owners)) for bucket in self._buckets()]
        if step in self._whole:
            return False  # here was what the others got
        for bucket, flat in reduced:
            for parameter, gradient in zip(bucket, self._engine.unflatten(flat, bucket), strict=True):
                parameter.grad = gradient
        self._whole[step] = [parameter.grad for parameter in self._parameters]
        return True

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """``parameter.grad`` is the sum of ``step``, also where the contributions to the next step have begun."""
        with in_place_of(self._parameters, list(self._whole[step])):
            yield

    def apply(self, step: int, optimizer: torch.optim.Optimizer, step_once: Callable[[], None], clipped: bool) -> None:
        """``step_once`` with the sum of ``step``, which stays as it is.  ``clipped``: it makes gradients of its own."""
        whole, sums = self._whole[step], [parameter.grad for parameter in self._parameters]
        with self.of(step):
            if type(optimizer) not in READ_ONLY and not clipped:
                self._put([gradient.clone() for gradient in whole])
            versions = [gradient._version for gradient in whole]
            step_once()
        assert versions == [gradient._version for gradient in whole], "the optimizer has changed gradients that a peer may still need"
        self._put([None if mine is gradient else mine for mine, gradient in zip(sums, whole, strict=True)])

    def _put(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    @property
    def _group(self) -> Any:
        return self._engine.mpu.get_data_parallel_group()

    def _sum(self, bucket: Parameters, step: int, holder: int | None, owners: list[list[Block]] | None) -> torch.Tensor:
        if holder is not None:
            return self._taken_over(bucket, step, holder)
        if owners is not None:
            total = self._blocks.total([self._places[parameter] for parameter in bucket], owners, self._group)
            return total.mul_(1.0 / self._group.size()) if self._engine.gradient_average else total
        gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in bucket]
        alone = len(bucket) == 1  # "flattened" it would be the contribution itself
        return self._engine.allreduce_bucket([gradients[0].clone()] if alone else gradients, self._group)

    def _taken_over(self, bucket: Parameters, step: int, holder: int) -> torch.Tensor:
        gradients = [self._whole[step][self._places[parameter]] if step in self._whole else torch.empty_like(parameter) for parameter in bucket]
        flat = self._engine.flatten(gradients).clone()
        dist.broadcast(flat, holder, self._group)
        return flat

    def _buckets(self) -> list[Parameters]:
        """Parameters by dtype, cut as stock DeepSpeed cuts them; smaller for blocks, all of which a worker then has once more."""
        limit = MEMORY_OPT_ALLREDUCE_SIZE if self._blocks is None else EXACT_BUCKET
        buckets: list[Parameters] = []
        by_dtype: dict[torch.dtype, Parameters] = {}
        for parameter in self._parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            buckets.append([])
            for parameter in parameters:
                buckets[-1].append(parameter)
                if sum(p.numel() for p in buckets[-1]) > limit:
                    buckets.append([])
        return [bucket for bucket in buckets if bucket]
