"""What plain torch lends the trainer (runtime/stage/ports.py): its optimizer's step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from recycle_plugin.runtime.stage.ports import Clip
from recycle_plugin.runtime.state.stage_state import StatePart


class PlainOptimizer:
    """Steps the torch optimizer ``wrapped``, with its learning-rate ``scheduler``, if it has one."""

    def __init__(self, wrapped: torch.optim.Optimizer, scheduler: Any) -> None:
        self.wrapped, self.scheduler = wrapped, scheduler
        self.steps, self.skipped = 0, 0

    def apply(self, clip: Clip) -> None:
        """Clip, step optimizer and scheduler, and count."""
        clip()
        self.wrapped.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.steps += 1

    def pass_over(self) -> None:
        """Count a step that is over, and step the scheduler, as if no step had been skipped; no weight changes."""
        if self.scheduler is not None:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch misses the optimizer's step
                self.scheduler.step()
        self.steps += 1

    def skip(self) -> None:
        """Count a step that is not applied; the scheduler waits for one that is."""
        self.steps += 1
        self.skipped += 1

    @property
    def counters(self) -> StatePart:
        """The part of a stage's state that is the counts of steps."""
        return StatePart("counters", get=lambda: {"steps": self.steps, "skipped": self.skipped}, set=self._count)

    def _count(self, counts: Mapping[str, int]) -> None:
        self.steps, self.skipped = counts["steps"], counts["skipped"]
