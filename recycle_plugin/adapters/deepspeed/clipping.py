"""Gradient norms over a pipeline, each stage's share known to all through the coordinator.

``true``: over all stages.  ``deepspeed``: what stock DeepSpeed 0.19 computes in fp32, which takes a pipeline
for a tensor-parallel group: it counts the first stage, and of the others only what calls itself tensor
parallel (megatron-core's parallel linears do), and averages that over the replicas; kept for comparisons.
"""

from __future__ import annotations

import math

import torch
from deepspeed.runtime.utils import is_model_parallel_parameter


def counted(parameters: list[torch.nn.Parameter], stage: int, kind: bool | str) -> list[torch.nn.Parameter]:
    """Those of the stage's parameters that the norm of this kind is over."""
    if kind == "deepspeed" and stage:
        return [parameter for parameter in parameters if is_model_parallel_parameter(parameter)]
    return parameters


def squared_norm(parameters: list[torch.nn.Parameter]) -> float:
    """Sum of the squared elements of all gradients, in the arithmetic of DeepSpeed's clip_grad_norm_."""
    norms = [parameter.grad.detach().float().norm(2.0) for parameter in parameters if parameter.grad is not None]
    return torch.stack(norms).pow(2.0).sum().float().item() if norms else 0.0


def total_norm(by_stage: dict[str, float], kind: bool | str, replicas: int) -> torch.Tensor:
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


def clip(parameters: list[torch.nn.Parameter], norm: torch.Tensor, limit: float) -> None:
    """Replace all gradients by min(1, limit / norm) times themselves, as DeepSpeed does; what they were stays for peers that lack it."""
    coefficient = torch.min(torch.tensor([1.0]), torch.tensor([float(limit)]) / (norm + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * coefficient.to(parameter.grad.device)
