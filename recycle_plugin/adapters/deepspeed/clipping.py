"""Gradient norms over a pipeline, each stage's share known to all through the coordinator.

``true``: over all stages.  ``deepspeed``: what stock DeepSpeed 0.19 computes in fp32, which counts the
first stage only and averages that over the replicas; kept for comparisons.
"""

from __future__ import annotations

import math

import torch


def squared_norm(parameters: list[torch.nn.Parameter]) -> float:
    """Sum of the squared elements of all gradients, in the arithmetic of DeepSpeed's clip_grad_norm_."""
    norms = [parameter.grad.detach().float().norm(2.0) for parameter in parameters if parameter.grad is not None]
    return torch.stack(norms).pow(2.0).sum().float().item() if norms else 0.0


def total_norm(by_stage: dict[str, float], kind: bool | str, replicas: int) -> torch.Tensor:
    """From each stage's :func:`squared_norm` (keys: stage numbers) to the norm that gradients are clipped by."""
    if kind == "deepspeed":
        share = torch.tensor(by_stage["0"]).pow(1.0 / 2.0) * 1.0 / float(replicas)
        total = share.clone()
        for _ in range(replicas - 1):
            total += share
        return total
    return torch.tensor(math.sqrt(math.fsum(by_stage.values())))


def clip(parameters: list[torch.nn.Parameter], norm: torch.Tensor, limit: float) -> None:
    """Scale all gradients in place by min(1, limit / norm), as DeepSpeed does."""
    coefficient = torch.min(torch.tensor([1.0]), torch.tensor([float(limit)]) / (norm + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.data.mul_(coefficient.to(parameter.grad.device))
