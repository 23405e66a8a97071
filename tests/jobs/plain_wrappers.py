"""Changes to a plain job from outside of it: what its script does with weights between steps."""

from __future__ import annotations

from functools import partial

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
