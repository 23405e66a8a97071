"""Where a real worker's store keeps tensors (core.stepstore.Tier)."""

from __future__ import annotations

from typing import Any

import torch


class Device:
    """Where they are made."""

    def keep(self, value: Any) -> Any:
        return value

    def weigh(self, kept: tuple[torch.Tensor, ...]) -> int:
        """In bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)


class Host(Device):
    """Memory from which they can be sent: keeping them there costs an accelerator nothing."""

    def keep(self, value: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach().contiguous().cpu() for tensor in value)
