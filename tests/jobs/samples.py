"""What jobs train on that bring no data of their own."""

from __future__ import annotations

import torch


class Samples(torch.utils.data.Dataset):
    """64 pairs of ``width`` numbers each, the same for everybody."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        return torch.randn(self._width, generator=made), torch.randn(self._width, generator=made)
