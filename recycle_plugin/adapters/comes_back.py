"""What scripts of workers that come back call, of DeepSpeed's engine and of plain jobs alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recycle_plugin.runtime.worker.trainer import Trainer


class ComesBack:
    """The calls of a script for ``_trainer``, which any worker of the job makes, and one that has come back needs."""

    _trainer: Trainer

    def on_join(self, callback: Callable[[int, Any], object], state: Callable[[], Any] | None = None) -> None:
        """Have ``callback(step, state)`` called in a worker that comes back, before its first step; ``step`` is the
        last step before that. Call it on every worker, before the first step.

        It is for values that a script keeps itself, such as an average of weights or counters. The lowest live rank of
        the same stage calls ``state()`` between two steps; the result must be something that torch.save can write.
        Without ``state``, ``callback`` gets None.
        """
        self._trainer.on_join(callback, state)

    @property
    def behind(self) -> bool:
        """Whether this worker has come back, and its script still goes through steps that are over."""
        return self._trainer.behind

    def skip_to_present(self) -> None:
        """Skip the steps that are over, all but the last, if this worker has come back; else do nothing. The count of
        steps (``steps``, DeepSpeed's ``global_steps``) and learning rates advance as with them. Evaluations and ends of
        data are not skipped. Call it before each step of a loop that counts by steps.
        """
        self._trainer.skip_to_present()

    def settle(self) -> None:
        """Wait until every step that a call has returned for is committed, whoever dies meanwhile."""
        self._trainer.settle()
