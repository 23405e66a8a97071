"""The losses of micro-batches, by name, as all workers are told them."""

from __future__ import annotations

from collections.abc import Mapping

Loss = float | tuple[float, dict[str, tuple[float, ...]]]
"""A loss; or (loss, what else a framework logs of the micro-batch, by name), which a wire makes a list."""


def number(loss: Loss) -> float:
    """Return the loss itself."""
    return loss[0] if isinstance(loss, (tuple, list)) else loss


def numbers(losses: Mapping[str, Loss]) -> dict[str, float]:
    """Return the losses themselves, by name."""
    return {name: number(loss) for name, loss in losses.items()}


def logs_more(losses: Mapping[str, Loss]) -> bool:
    """Return whether a framework logs something else of some micro-batch."""
    return any(loss is not number(loss) for loss in losses.values())


def mean(losses: Mapping[str, Loss]) -> float:
    return sum(map(number, losses.values())) / len(losses)
