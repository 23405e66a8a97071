"""Gradient norms over a pipeline, each stage's share known to all through the coordinator, and what is done about them.

``true``: over all stages.  ``deepspeed``: what stock DeepSpeed 0.19 computes in fp32, which takes a pipeline
for a tensor-parallel group: it counts the first stage, and of the others only what calls itself tensor
parallel (megatron-core's parallel linears do), and averages that over the replicas; kept for comparisons.
"""

from __future__ import annotations

import math
from typing import AbstractSet, Any, Mapping

import torch
from deepspeed.runtime.utils import is_model_parallel_parameter

from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.stepstore import StepStore

Parameters = list[torch.nn.Parameter]


class Clipping:
    """Of the worker whose ``store`` it is, where norms are as soon as they are known.  ``elsewhere``: parameters that are another stage's too, which counts them.  ``limit`` 0: nothing is clipped, but a norm that is not finite still skips its step."""

    def __init__(
        self, store: StepStore, parameters: Parameters, replicas: int, kind: bool | str, limit: float, elsewhere: AbstractSet[torch.nn.Parameter]
    ) -> None:  # fmt: skip
        self._store, self._stage, self._elsewhere = store, store.seat.stage, elsewhere
        self._parameters, self._replicas = parameters, replicas
        self._kind, self._limit = kind, limit

    def share(self) -> float:
        """The stage's, of what ``parameter.grad`` is; its workers hold the same gradients and find the same."""
        return squared_norm(counted(self._parameters, self._stage, self._kind, self._elsewhere))

    def norm_of(self, shares: Mapping[str, float]) -> torch.Tensor:
        """Over all stages."""
        return total_norm(shares, self._kind, self._replicas)

    def norm(self, step: int) -> torch.Tensor | None:
        """None where it is not known, or not yet."""
        found = self._store.get(Datum("norm", self._stage, None, step))
        return None if found is None else torch.as_tensor(found)

    def skips(self, step: int) -> bool:
        """Whether ``step`` must not be applied."""
        norm = self.norm(step)
        return norm is not None and not bool(torch.isfinite(norm))

    def clips(self, step: int) -> bool:
        """Whether :meth:`clip` puts gradients of its own in place."""
        return self._limit > 0 and self.norm(step) is not None and not self.skips(step)

    def clip(self, step: int) -> None:
        if self.clips(step):
            clip(self._parameters, self.norm(step), self._limit)


class Skipped:
    """In the optimizer's place for a step that is not applied: stock code does the counting, as for fp16's overflows."""

    overflow = True

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        pass


def counted(parameters: Parameters, stage: int, kind: bool | str, elsewhere: AbstractSet[torch.nn.Parameter] = frozenset()) -> Parameters:
    """Those of the stage's parameters that the norm of this kind is over; ``elsewhere``: tied ones that another stage counts."""
    if kind == "deepspeed":
        return [parameter for parameter in parameters if not stage or is_model_parallel_parameter(parameter)]
    return [parameter for parameter in parameters if parameter not in elsewhere]


def squared_norm(parameters: Parameters) -> float:
    """Sum of the squared elements of all gradients, in the arithmetic of DeepSpeed's clip_grad_norm_ (which forgets imaginary parts)."""
    gradients = (parameter.grad.detach() for parameter in parameters if parameter.grad is not None)
    norms = [(torch.view_as_real(each) if each.is_complex() else each).float().norm(2.0) for each in gradients]
    return torch.stack(norms).pow(2.0).sum().float().item() if norms else 0.0


def total_norm(by_stage: Mapping[str, float], kind: bool | str, replicas: int) -> torch.Tensor:
    """From each stage's :func:`squared_norm` (keys: stage numbers) to the norm that gradients are clipped by."""
    if kind == "deepspeed":
        squares = torch.tensor(by_stage["0"])
        for stage in range(1, len(by_stage)):
            squares += torch.tensor(by_stage[str(stage)])
        share = squares.pow(1.0 / 2.0) * 1.0 / float(replicas)
        total = share.clone()
        for _ in range(replicas - 1):
            total += share
        return total
    return torch.tensor(math.sqrt(math.fsum(by_stage.values())))


def clip(parameters: Parameters, norm: torch.Tensor, limit: float) -> None:
    """Replace all gradients by min(1, limit / norm) times themselves, as DeepSpeed does; what they were stays for peers that lack it."""
    coefficient = torch.min(torch.tensor([1.0]), torch.tensor([float(limit)]) / (norm + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * coefficient.to(parameter.grad.device)
