"""The loss scale of fp16, by the framework's own rules, as state that a step changes and an undo restores.

The last stage multiplies its losses, and every stage divides its gradients before they are applied. If a norm is not
finite the step is skipped and the scale goes down. All stages come to the same scale, since they have applied or
skipped the same steps. An undone step's change of the scale is undone too, and what was computed with that scale is
void (core/coordinator/facts/step_validation.py).
"""

from __future__ import annotations

from typing import Any

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.ports import Scaler


class LossScale:
    """The loss scale of ``scaler``, whose attributes are its state; None: the loss is not scaled."""

    def __init__(self, scaler: Scaler | None) -> None:
        self._scaler = scaler

    @property
    def value(self) -> float:
        """The present scale, 1.0 without a scaler."""
        return self._scaler.loss_scale if self._scaler else 1.0

    def stepped(self, skipped: bool) -> None:
        """Change the scale after a step, applied or ``skipped``. Raises RecycleError if it can't go down further."""
        if self._scaler:
            try:
                self._scaler.update_scale(skipped)
            except Exception as error:  # DeepSpeed's scaler raises a bare Exception
                raise RecycleError(
                    f"fp16.min_loss_scale: the loss scale is {self.value:g} and gradients still overflow ({error}); "
                    "look for what makes them infinite, or write a smaller minimum"
                ) from None

    def state(self) -> dict[str, Any]:
        """Return the scaler's attributes, for checkpoints and undo."""
        return dict(vars(self._scaler)) if self._scaler else {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the scaler's attributes."""
        if self._scaler:
            vars(self._scaler).update(state)
