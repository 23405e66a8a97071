"""From a stage's contributions to a step that is applied, or skipped, and from there to one that is taken back.

Gradients are summed (gradients.py), those of tied weights over their stages too, judged by their norm (clipping.py,
core/coordinator/step_validation.py), unscaled (scaling.py), clipped, and applied by stock code, which also counts.
What takes the step back (runtime/undo) is recorded where the gradients are what the optimizer will apply: stock code
clips after STEP has begun.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.stage.clipping import Clipping
from recycle_plugin.runtime.stage.gradients import Gradients
from recycle_plugin.runtime.stage.stage import Stage
from recycle_plugin.runtime.state.stage_state import StageState
from recycle_plugin.runtime.state.undo import KINDS, Undo
from recycle_plugin.runtime.worker.ports import Optimizer, Parameters
from recycle_plugin.runtime.worker.scaling import LossScale
from recycle_plugin.runtime.worker.scripted import ScriptedStage


class Stepping:
    """Of a worker whose steps ``optimizer`` applies.  ``undo``: what takes them back."""

    def __init__(
        self,
        optimizer: Optimizer,
        stage: Stage | ScriptedStage,
        parameters: Parameters,
        gradients: Gradients,
        clipping: Clipping,
        scale: LossScale,
        undo: Undo,
        session: Session,
    ) -> None:
        self._optimizer, self._stage, self._parameters, self._session = optimizer, stage, parameters, session
        self._gradients, self._clipping, self._scale, self._undo = gradients, clipping, scale, undo
        self._applying = 0  # the step that the optimizer is at
        stage.loss_scale = scale.value

    # --- forwards ----------------------------------------------------------------------------------

    def reduce(self, step: int, holder: int | None) -> list[torch.Tensor] | None:
        """Every live worker of the stage has the whole gradient, or its contributions are as before.

        Where the worker of rank ``holder`` has it from before a failure, the others get it from there.
        """
        whole = self._gradients.reduce(step, holder)
        if whole is not None:
            self._stage.summed()
        return whole

    def tie(self, step: int) -> dict[int, torch.Tensor]:
        """What is tied is summed over the stages that share it."""
        return self._gradients.tie(step)

    def norm_of(self, shares: Mapping[str, float]) -> torch.Tensor:
        """Over all stages, from the squared share of each."""
        return self._clipping.norm_of(shares)

    def apply(self, step: int) -> None:
        """Apply ``step``, or skip it where its norm is known and not finite."""
        self._applying = step
        skips, scaled = self._clipping.skips(step), self._scale.value != 1.0
        once = self._skip if skips else self._unscale_and_apply if scaled else self._optimizer.apply
        self._gradients.apply(step, self._optimizer.wrapped, once, scaled or self._clipping.clips(step))
        # which may have weights as they were, cast, where a step ends in another one's train_batch
        torch.clear_autocast_cache()
        self._rescale(step, skips)

    def clip(self) -> None:
        """Of the step that stock code is applying."""
        self._clipping.clip(self._applying)

    def norm(self) -> torch.Tensor | None:
        """... by what that is clipped; None where that is not known yet."""
        return self._clipping.norm(self._applying)

    def share(self, step: int) -> float:
        """This stage's part of the norm, squared."""
        with self._gradients.of(step):
            return self._clipping.share() / self._scale.value**2

    def _unscale_and_apply(self) -> None:
        self._scale.unscale(self._parameters)
        self._optimizer.apply()

    def _skip(self) -> None:
        """Count the step, and change no weight: to take that back there is nothing but counts."""
        for parameter in self._parameters:
            parameter.grad = None
        self._undo.before_step()
        self._optimizer.skip()

    def _rescale(self, step: int, skipped: bool) -> None:
        before, session = self._scale.value, self._session
        self._scale.stepped(skipped)
        after = self._stage.loss_scale = self._scale.value
        if after != before and session.is_first:
            session.note(
                "loss_scale",
                f"the loss scale goes from {before:g} to {after:g} after step {step}",
                step=step,
                scale=after,
            )

    # --- and back ----------------------------------------------------------------------------------

    def undo(self, step: int) -> None:
        """Take ``step``, the last one, back."""
        self._undo.restore()
        torch.clear_autocast_cache()

    def forget_sums(self) -> None:
        """No gradient that is not applied counts."""
        self._gradients.forget()
        self._stage.forget_sums()


def undo_record(kind: str, state: StageState) -> Undo:
    """What takes a step of ``state``'s optimizer back, kept whenever it steps."""
    record: Undo = KINDS[kind](state)
    state.optimizer.optimizer.register_step_pre_hook(lambda *_: record.before_step())
    return record
