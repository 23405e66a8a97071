"""Plain torch's optimizer step, behind the trainer's optimizer port (runtime/stage/ports.py)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from recycle_plugin.runtime.stage.ports import Clip
from recycle_plugin.runtime.state.stage_state import StatePart


class PlainOptimizer:
    """Steps the torch optimizer ``wrapped`` and its learning-rate ``scheduler``, if there is one."""

    def __init__(self, wrapped: torch.optim.Optimizer, scheduler: Any) -> None:
        self.wrapped, self.scheduler = wrapped, scheduler
        self.steps, self.skipped = 0, 0

    def apply(self, clip: Clip) -> None:
        clip()
        self.wrapped.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.steps += 1

    def pass_over(self) -> None:
        """Count a step from before a newcomer's time, and step the scheduler as if no step had been skipped. Changes no
        weight.
        """
        if self.scheduler is not None:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # no optimizer step came before
                self.scheduler.step()
        self.steps += 1

    def skip(self) -> None:
        """Count a step that is not applied. The scheduler is not stepped."""
        self.steps += 1
        self.skipped += 1

    @property
    def counters(self) -> StatePart:
        """The counts of steps, as a part of a stage's state."""
        return StatePart("counters", get=lambda: {"steps": self.steps, "skipped": self.skipped}, set=self._count)

    def _count(self, counts: Mapping[str, int]) -> None:
        self.steps, self.skipped = counts["steps"], counts["skipped"]
