"""The steps of a worker's optimizer, from a stage's contributions to a step that is applied, skipped or undone.

Gradients are summed (runtime/stage/gradients.py), those of tied weights over their stages too. They are judged by their
norm (runtime/stage/clipping.py, core/coordinator/facts/step_validation.py), unscaled (runtime/worker/scaling.py),
clipped, and applied by stock code, which also counts. The undo record (runtime/state/undo) is made when the gradients
are those that the optimizer applies: stock code clips after STEP has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from recycle_plugin.core.vocabulary.step_batches import LiveShare
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.stage.clipping import Clipping
from recycle_plugin.runtime.stage.gradients import Gradients
from recycle_plugin.runtime.stage.ports import OptimizerStep
from recycle_plugin.runtime.stage.pushed_stage import PushedStage
from recycle_plugin.runtime.stage.rates import ScaledRates, around_steps
from recycle_plugin.runtime.stage.stage import Stage
from recycle_plugin.runtime.state.stage_state import StageState
from recycle_plugin.runtime.state.undo import KINDS, Undo
from recycle_plugin.runtime.state.undo.inverse import Inverse
from recycle_plugin.runtime.state.undo.kept import Keeper
from recycle_plugin.runtime.worker.scaling import LossScale
from recycle_plugin.runtime.worker.scripted import ScriptedStage


class Stepping:
    """Sums ``gradients``, and applies and undoes the steps of one worker's ``optimizer``, which ``clipping`` judges;
    ``undo`` is the undo record. ``prepared``: the last step that was prepared. ``await_readers`` returns when nobody
    reads the state that a step or an undo is about to change.
    """

    def __init__(
        self,
        optimizer: OptimizerStep,
        stage: Stage | ScriptedStage | PushedStage,
        gradients: Gradients,
        clipping: Clipping,
        scale: LossScale,
        undo: Undo,
        session: Session,
        await_readers: Callable[[], None] = lambda: None,
    ) -> None:
        self._optimizer, self._stage, self._session = optimizer, stage, session
        self.gradients, self.clipping, self._scale, self._undo = gradients, clipping, scale, undo
        self._await_readers = await_readers
        self._contributing = LiveShare()
        ScaledRates(optimizer.wrapped, lambda: self._contributing.rate_factor)
        self._applying = 0  # the step being applied
        self._by: torch.Tensor | None = None  # the factor that clips its gradients
        self.prepared = 0
        stage.loss_scale = scale.value

    def go_by(self, share: LiveShare) -> None:
        """Set the share of the replicas that contribute to the sums and steps from now on."""
        self._contributing = share

    # --- forwards ----------------------------------------------------------------------------------

    def reduce(self, step: int, holder: int | None, agree: Callable[[], object] = bool) -> list[torch.Tensor] | None:
        """Sum the stage's gradients, and divide them by the part of the replicas that contributed. Afterwards every
        live worker of the stage has the sum, or its contributions are unchanged. If the worker of rank ``holder`` has
        the sum from before a failure, the others get it from there. ``agree``: see Gradients.reduce.
        """
        whole = self.gradients.reduce(step, holder, agree)
        if whole is not None and holder is None and not self._contributing.whole:
            torch._foreach_mul_(whole, self._contributing.sum_factor)
        if whole is not None:
            self._stage.summed()
        return whole

    def reduce_alone(self, step: int) -> list[torch.Tensor]:
        """Sum the stage's gradients in a replay, where one worker has the contributions of all."""
        whole = self.gradients.reduce_alone()
        self._stage.summed()
        return whole

    def apply(self, step: int) -> None:
        """Apply ``step``, or skip it if its norm is known and not finite."""
        self._await_readers()
        self._applying = step
        skips, scaled = self.clipping.skips(step), self._scale.value != 1.0
        self._by = None if skips else self.clipping.coefficient(step)
        once = self._skip if skips else self._unscale_and_apply if scaled else partial(self._optimizer.apply, self.clip)
        if not skips and not self.gradients.any(step):  # a newcomer without any of its optimizer's state
            once = self._optimizer.pass_over
        self.gradients.apply(step, self._optimizer.wrapped, once, scaled or self._by is not None)
        # the cache may have outdated weights, cast, if a step ends in another one's train_batch
        torch.clear_autocast_cache()
        self._rescale(step, skips)

    def prepare(self, step: int, committed: int) -> None:
        """Prepare for ``step`` while its gradients are computed, once the step before is ``committed``."""
        if committed >= step - 1 == self._optimizer.steps:
            self.prepared = step
            self._undo.prepare()

    def clip(self) -> torch.Tensor | None:
        """Clip the gradients of the step being applied. Returns its norm, None while it is not known."""
        if (by := self._by) is not None:
            self.gradients.scale(lambda gradient: gradient * by)
        return self.clipping.norm(self._applying)

    def share(self, step: int) -> float:
        """Return this stage's squared share of the norm of ``step``, without the loss scale."""
        with self.gradients.of(step):
            return self.clipping.share() / self._scale.value**2

    def _unscale_and_apply(self) -> None:
        by = 1.0 / self._scale.value  # to the bit as DeepSpeed computes it; the step may change the scale
        self.gradients.scale(lambda gradient: gradient * by)
        self._optimizer.apply(self.clip)

    def _skip(self) -> None:
        """Count the step without changing a weight; to undo it there are only counts."""
        self.gradients.empty()
        self._undo.before_step()
        self._optimizer.skip()

    def _rescale(self, step: int, skipped: bool) -> None:
        before, session = self._scale.value, self._session
        self._scale.stepped(skipped)
        after = self._stage.loss_scale = self._scale.value
        if after != before and session.view.is_first:
            session.note(
                "loss_scale",
                f"the loss scale goes from {before:g} to {after:g} after step {step}",
                step=step,
                scale=after,
            )

    # --- and back ----------------------------------------------------------------------------------

    def undo(self, step: int) -> None:
        """Undo ``step``, the last one. Raises RecycleError if an inexact undo can't."""
        self._await_readers()
        self._undo.restore()
        torch.clear_autocast_cache()

    def rewritten(self) -> None:
        """Prepare the next step again, since the state was changed by something else than a step."""
        self.prepared = 0
        torch.clear_autocast_cache()

    def forget_sums(self) -> None:
        """Drop all gradients that are not applied."""
        self.gradients.empty()
        self._stage.forget_sums()


def undo_record(kind: str, state: StageState, keeper: Keeper | None = None) -> Undo:
    """Return ``state``'s undo record, made before each step. ``keeper``: has gradients until the commit."""
    record: Undo = KINDS[kind](state, keeper)
    optimizer = state.optimizer.optimizer
    if isinstance(record, Inverse):  # goes by the gradients that hooks have left
        around_steps(optimizer, record.before_hooks, first=True)
        around_steps(optimizer, record.before_step)
    else:  # also has what hooks change, else a redo has that twice
        around_steps(optimizer, record.before_step, first=True)
    return record
