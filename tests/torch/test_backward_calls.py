"""What a script's compute() calls backward of, beside the loss that it returns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recycle_plugin.adapters.plain.backward_calls import watched


def losses(kind: str):
    """A compute() over one layer that calls backward of the loss, or of something else."""
    torch.manual_seed(0)
    layer, batch, scaler = nn.Linear(3, 1), torch.randn(4, 3), torch.amp.GradScaler("cpu")

    def compute(step: int, replica: int, micro_batch: int) -> torch.Tensor:
        loss = layer(batch).square().mean()
        if kind == "parts":
            (0.25 * loss).backward(retain_graph=True)
            (0.75 * loss).backward()
        elif kind == "scaled":
            scaler.scale(loss).backward()
        else:
            (loss / 4 if kind == "divided" else loss).backward()
        return loss

    return compute


@pytest.mark.parametrize(("kind", "odd"), (("loss", False), ("parts", False), ("scaled", True), ("divided", True)))
def test_gradients_of_something_else_than_the_loss_are_warned_of_once(kind, odd):
    warned: list[str] = []
    compute = watched(losses(kind), warned.append)
    assert compute(1, 0, 0) == compute(1, 0, 0)
    assert len(warned) == odd and all("but calls backward() on" in text for text in warned)
