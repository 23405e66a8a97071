"""A stage's gradients, from contributions in ``parameter.grad`` over their sum to the commit of the step.

The sum stands in second buffers until every bucket is done, so an interrupted one leaves the contributions as they were;
and it is kept until the step is committed, since a peer may lack it, or this worker may have to apply it once more.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE

READ_ONLY = (torch.optim.Adam, torch.optim.AdamW)  # known to leave gradients as they are; Nesterov's foreach form does not
Parameters = list[torch.nn.Parameter]


class Gradients:
    """Of ``parameters``, summed by ``engine``, DeepSpeed's: in its buckets, averaged by the logical number of replicas."""

    def __init__(self, engine: Any, parameters: Parameters) -> None:
        self._engine = engine
        self._parameters = parameters
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
        reduced = [(bucket, self._sum(bucket, step, holder)) for bucket in self._buckets()]
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
        aside = [parameter.grad for parameter in self._parameters]
        self._put(self._whole[step])
        try:
            yield
        finally:
            self._put(aside)

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

    def _sum(self, bucket: Parameters, step: int, holder: int | None) -> torch.Tensor:
        group = self._engine.mpu.get_data_parallel_group()
        gradients = [parameter.grad for parameter in bucket]
        if holder is None:
            alone = len(bucket) == 1  # "flattened" it would be the contribution itself
            return self._engine.allreduce_bucket([gradients[0].clone()] if alone else gradients, group)
        if step in self._whole:
            known = dict(zip(self._parameters, self._whole[step], strict=True))
            gradients = [known[parameter] for parameter in bucket]
        flat = self._engine.flatten(gradients).clone()
        dist.broadcast(flat, holder, group)
        return flat

    def _buckets(self) -> list[Parameters]:
        """Parameters by dtype, cut as stock DeepSpeed cuts them."""
        buckets: list[Parameters] = []
        by_dtype: dict[torch.dtype, Parameters] = {}
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            buckets.append([])
            for parameter in parameters:
                buckets[-1].append(parameter)
                if sum(p.numel() for p in buckets[-1]) > MEMORY_OPT_ALLREDUCE_SIZE:
                    buckets.append([])
        return [bucket for bucket in buckets if bucket]
