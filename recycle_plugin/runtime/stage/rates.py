"""Learning rates that are scaled for one step: while the optimizer applies it, and no longer.

A scheduler reads the rates of a step to make the next ones of them, a script reads and sets them, and checkpoints,
hashes and newcomers get them as they are.  None of these may see the factor of a step that lacks replicas
(core/vocabulary/step_batches.py): it would be in the next step's rate once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ScaledRates:
    """Scales what ``optimizer`` applies each step with by ``factor()``.  To be made after whatever records the state
    before a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[], float]) -> None:
        self._optimizer, self._factor = optimizer, factor
        self._rates: list[Any] = []  # as they are set, during a step
        optimizer.register_step_pre_hook(self._scale)
        optimizer.register_step_post_hook(self._put_back)

    def _scale(self, *_: Any) -> None:
        self._put_back()  # of a step that has ended with an error
        factor = self._factor()
        if factor != 1.0:
            self._rates = [group["lr"] for group in self._optimizer.param_groups]
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _put_back(self, *_: Any) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates):
            group["lr"] = rate
        self._rates = []
