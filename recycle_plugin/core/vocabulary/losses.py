"""The losses of micro-batches, by their names, as all workers are told them."""

from __future__ import annotations

from collections.abc import Mapping

Loss = float | tuple[float, dict[str, tuple[float, ...]]]
"""A loss; or (loss, what else a framework logs of the micro-batch, by name), a list where it has come by a wire."""


def number(loss: Loss) -> float:
    """The loss itself."""
    return loss if isinstance(loss, float | int) else loss[0]


def mean(losses: Mapping[str, Loss]) -> float:
    """The mean of the losses themselves."""
    return sum(map(number, losses.values())) / len(losses)
