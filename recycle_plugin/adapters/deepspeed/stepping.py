"""From a stage's contributions to a step that is applied, or skipped, and from there to one that is taken back.

Gradients are summed (gradients.py), those of tied weights over their stages too, judged by their norm (clipping.py, core/verdict.py), unscaled (scaling.py), clipped, and applied
by stock code, which also counts.  What takes the step back (runtime/undo) is recorded where the gradients are what the optimizer
will apply: stock code clips after STEP has begun.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Mapping

import torch

from recycle_plugin.adapters.deepspeed.bf16 import trained
from recycle_plugin.adapters.deepspeed.clipping import Clipping, Skipped
from recycle_plugin.adapters.deepspeed.gradients import Gradients
from recycle_plugin.adapters.deepspeed.scaling import LossScale
from recycle_plugin.core.stepstore import StepStore
from recycle_plugin.runtime.blocks import BlockSums
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.stage import Stage
from recycle_plugin.runtime.tied import TiedWeight
from recycle_plugin.runtime.undo import KINDS, Undo
from recycle_plugin.settings import Settings

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
Parameters = list[torch.nn.Parameter]


class Stepping:
    """Of ``engine``, DeepSpeed's.  ``apply_stock``: DeepSpeed's own step; ``fp16``: its section, where losses are to be scaled."""

    def __init__(
        self, engine: Any, stage: Stage, store: StepStore, parameters: Parameters, blocks: BlockSums | None, tied: list[TiedWeight], session: Session,
        settings: Settings, fp16: Any, apply_stock: Callable[[], None],
    ) -> None:  # fmt: skip
        self._engine, self._stage, self._parameters, self._session = engine, stage, parameters, session
        self._apply_stock = apply_stock
        self._gradients = Gradients(engine, store, parameters, blocks, tied)
        elsewhere = {weight.parameter for weight in tied if weight.stages[0] != engine.stage_id}
        self._clipping = Clipping(store, parameters, engine.grid.data_parallel_size, settings.norm, engine.gradient_clipping(), elsewhere)
        self._scale = LossScale(fp16)
        self._undo = undo_record(settings.undo, parameters, engine.basic_optimizer, self._counters, self._set_counters)
        self._applying = 0  # the step that the optimizer is at
        stage.loss_scale = self._scale.value

    def changed(self) -> Iterator[torch.Tensor]:
        """What a step changes: weights, masters, and the optimizer's state as far as there is one; and buffers, which what is left of a step reads."""
        optimizer = self._engine.basic_optimizer
        yield from trained(self._engine.module)
        yield from self._engine.module.buffers()
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from filter(torch.is_tensor, state.values())

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
        once = self._skip if skips else self._unscale_and_apply if scaled else self._apply_stock
        self._gradients.apply(step, self._engine.basic_optimizer, once, scaled or self._clipping.clips(step))
        torch.clear_autocast_cache()  # which may have weights as they were, cast, where a step ends in another one's train_batch
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
        self._apply_stock()

    def _skip(self) -> None:
        """Count the step, and change no weight: to take that back there is nothing but counts."""
        for parameter in self._parameters:
            parameter.grad = None
        self._undo.before_step()
        engine, optimizer = self._engine, self._engine.optimizer
        engine.optimizer = Skipped(optimizer)
        try:
            self._apply_stock()
        finally:
            engine.optimizer = optimizer

    def _rescale(self, step: int, skipped: bool) -> None:
        before, session = self._scale.value, self._session
        self._scale.stepped(skipped)
        after = self._stage.loss_scale = self._scale.value
        if after != before and session.is_first:
            session.note("loss_scale", f"the loss scale goes from {before:g} to {after:g} after step {step}", step=step, scale=after)

    # --- and back ----------------------------------------------------------------------------------

    def undo(self, step: int) -> None:
        """Take ``step``, the last one, back."""
        self._undo.restore()
        torch.clear_autocast_cache()
        if self._engine.masters is not None:
            self._engine.masters.round_off()

    def forget_sums(self) -> None:
        """No gradient that is not applied counts."""
        self._gradients.forget()
        self._stage.forget_sums()

    def _counters(self) -> dict:
        scheduler = self._engine.lr_scheduler
        counts = {name: getattr(self._engine, name) for name in COUNTERS}
        return {"scheduler": scheduler.state_dict() if scheduler is not None else None, "loss_scale": self._scale.state(), **counts}

    def _set_counters(self, counters: dict) -> None:
        if self._engine.lr_scheduler is not None:
            self._engine.lr_scheduler.load_state_dict(counters["scheduler"])
        self._scale.set_state(counters["loss_scale"])
        self._stage.loss_scale = self._scale.value
        for name in COUNTERS:
            setattr(self._engine, name, counters[name])


def undo_record(
    kind: str, parameters: Parameters, optimizer: torch.optim.Optimizer, counters: Callable[[], Any], set_counters: Callable[[Any], None]
) -> Undo:
    """What takes a step of ``optimizer`` back, kept whenever it steps."""
    record = KINDS[kind](parameters, optimizer, counters, set_counters)
    optimizer.register_step_pre_hook(lambda *_: record.before_step())
    return record
