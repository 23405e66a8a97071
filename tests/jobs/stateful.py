"""A loader that has states: torchdata's, in which processes read ahead of what is asked for."""

from __future__ import annotations

from typing import Any

import torch


def stateful(dataset: Any, size: int, seed: int, helpers: int = 2) -> Any:
    """A loader of batches of ``size`` samples in an order by ``seed``, and by whether it has ``helpers``."""
    from torchdata.stateful_dataloader import StatefulDataLoader  # other cases of the jobs do without

    generator = torch.Generator().manual_seed(seed)
    return StatefulDataLoader(dataset, size, shuffle=True, num_workers=helpers, generator=generator)


def order(length: int, seed: int) -> list[int]:
    """The order in which such a loader gives ``length`` samples."""
    return [sample for batch in stateful(range(length), 1, seed) for sample in batch.tolist()]
