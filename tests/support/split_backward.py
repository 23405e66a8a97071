"""Layers whose backward is split."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recycle_plugin.runtime.stage.split_backward import DeferredWeights, PendingWeights


class Checkpointed(nn.Module):
    """Runs ``inner`` under one kind of activation checkpointing."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x):
        if self.kind == "none":
            return self.inner(x)
        if self.kind.startswith("torch"):
            return checkpoint(self.inner, x, use_reentrant=self.kind == "torch reentrant")
        from deepspeed.runtime.activation_checkpointing import checkpointing

        return (checkpointing.checkpoint if self.kind == "deepspeed" else checkpointing.non_reentrant_checkpoint)(
            self.inner, x
        )


KINDS = ("none", "torch non-reentrant", "torch reentrant", "deepspeed", "deepspeed non-reentrant")


def block(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(4 * width, width, bias=False),
    )


def activations(*shape: int, count: int = 3, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for _ in range(count)]


def in_i(deferred: DeferredWeights, run: Callable[[], object]) -> PendingWeights:
    """A forward and its backward, as F and I do them; W is left."""
    with deferred.forward(), deferred.hold() as pending:
        run()
    return pending
