"""What a step has made, and the sums and steps that plugin and stock autograd have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.runtime.stage.boundary import Tensors
from recycle_plugin.runtime.stage.masters import Masters

from .model import HABITS, HALVES, OPTIMIZERS, Model


@dataclass
class Outcome:
    """Of one step.  Weights and sums by stage and name; what travels by the stage that gives it, or gets it back."""

    losses: dict[MicroBatch, Tensor] = field(default_factory=dict)
    activations: dict[tuple[int, MicroBatch], Tensors] = field(default_factory=dict)
    gradients: dict[tuple[int, MicroBatch], Tensors] = field(default_factory=dict)
    sums: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    weights: dict[tuple[int, str], Tensor] = field(default_factory=dict)


class Trained:
    """A stage's weights, or their masters, and what steps them."""

    def __init__(self, model: Model, module: nn.Module) -> None:
        self.module, self._habit, self._memory = module, HABITS[model.habit], {}
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.names, weights = tuple(trained), tuple(trained.values())
        self.masters = Masters(weights) if model.dtype in HALVES else None
        self.parameters = list(weights) if self.masters is None else self.masters.parameters
        self._optimizer = OPTIMIZERS[model.optimizer](self.parameters or [torch.zeros(1)])

    def step(self, total: list[Tensor], step: int) -> None:
        for parameter, each in zip(self.parameters, total):
            parameter.grad = each.clone()
        self._optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        if self.masters is not None:
            self.masters.round_off()
        self._habit(self.module, step, self._memory)

    def weights(self, stage: int) -> dict[tuple[int, str], Tensor]:
        return {(stage, name): parameter.detach().clone() for name, parameter in self.module.named_parameters()}

    @torch.no_grad()
    def total(self, contributions: list[list[Tensor | None]]) -> list[Tensor]:
        """The sums, as DeepSpeed makes them: what is missing counts as zeros."""
        columns = (
            [torch.zeros_like(parameter) if one is None else one for one in ones]
            for parameter, *ones in zip(self.parameters, *contributions)
        )
        return [sum(column[1:], column[0].clone()) for column in columns]


def differ(mine: Tensor, theirs: Tensor, tolerance: float = 0.0) -> bool:
    """In type, shape or any bit, but for the sign of zero.  ``tolerance``: relative to the largest number."""
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return True
    if not tolerance or not theirs.numel():
        return not _same(mine, theirs)
    return not torch.allclose(
        mine, theirs, rtol=0.0, atol=tolerance * theirs.abs().nan_to_num(0.0, 0.0).max().item(), equal_nan=True
    )


def _same(mine: Tensor, theirs: Tensor) -> bool:
    return bool(torch.all((mine == theirs) | (mine.isnan() & theirs.isnan())))
