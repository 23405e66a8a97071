"""Changes to a plain job from outside of it: what its script does with weights between steps."""

from __future__ import annotations

from functools import partial

import odd_optimizers
import torch
import touching

from recycle_plugin.adapters.plain import Pipeline

SCRIPT = touching.Script(
    Pipeline,
    "step",
    lambda pipeline: pipeline.steps,
    lambda pipeline: pipeline.optimizer,
    lambda pipeline: torch.float32,
)
touch_weights = partial(touching.touch_weights, SCRIPT)


def odd_optimizer(kind: str) -> None:
    """The job trains with an optimizer, and a scheduler, of odd_optimizers.py."""
    make = Pipeline.__init__

    def changed(self: Pipeline, layers, loss, optimizer, *given, **named) -> None:
        named["scheduler"] = odd_optimizers.SCHEDULERS.get(kind)
        make(self, layers, loss, (odd_optimizers.MADE | odd_optimizers.REFUSED)[kind], *given, **named)

    Pipeline.__init__ = changed
