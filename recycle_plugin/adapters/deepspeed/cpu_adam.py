"""Makes DeepSpeed's Adam on the CPU depend on its Python state only.

Its C++ code keeps the powers of both betas from step to step as products (csrc/includes/cpu_adam.h). A process that
starts later computes them by ``pow``, which rounds differently, so a rejoining worker would have other bits and be
turned down. When steps do not follow each other the code computes by ``pow``: here each step does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

KERNEL = "multi_tensor_adam"  # of deepspeed.ops.adam.FusedAdam


def make_stateless(optimizer: torch.optim.Optimizer) -> None:
    """Have no step of ``optimizer`` depend on state in C++, if it is DeepSpeed's Adam on the CPU."""
    stock = getattr(optimizer, KERNEL, None)
    parts = [part for group in optimizer.param_groups for part in group["params"]]
    if stock is None or any(part.device.type != "cpu" for part in parts):
        return

    @functools.wraps(stock)
    def step_alone(
        chunk: int, flag: Any, lists: Any, lr: float, beta1: float, beta2: float, eps: float, step: int, *how: Any
    ) -> Any:
        nothing = [[each.reshape(-1)[:0] for each in tensors[:1]] for tensors in lists]
        stock(chunk, flag, nothing, lr, beta1, beta2, eps, 0, *how)
        return stock(chunk, flag, lists, lr, beta1, beta2, eps, step, *how)

    setattr(optimizer, KERNEL, step_alone)
