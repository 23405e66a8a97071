"""Megatron-LM's side of what a worker's step needs (runtime/stage/ports.py): optimizer, norm, masters, tied weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from torch import nn

from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.runtime.stage.clipping import TrueNorm
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.stage.ports import Clip, trained
from recycle_plugin.runtime.stage.tied import TiedWeight
from recycle_plugin.runtime.state.stage_state import StatePart


class MegatronOptimizer:
    """The step of Megatron's optimizer ``inner``, and of its learning-rate ``scheduler``, by ``samples()`` each."""

    def __init__(self, inner: Any, scheduler: Any, steps: int, samples: Callable[[], int]) -> None:
        self._inner, self._scheduler, self._samples = inner, scheduler, samples
        self.steps, self.skipped = steps, 0
        self.last_norm: float | None = None  # that the last step was clipped by

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The torch optimizer that changes the weights, or their masters."""
        return self._inner.optimizer

    def apply(self, clip: Clip) -> None:
        """Clip, step, and count."""
        norm = clip()
        self.last_norm = None if norm is None else float(norm.float())  # as Megatron's log has it
        self._inner.step_with_ready_grads()
        self.pass_over()

    def pass_over(self) -> None:
        """Count a step that is over, and step the scheduler; no weight changes."""
        self._scheduler.step(increment=self._samples())
        self.steps += 1

    def skip(self) -> None:
        """Count a step that is not applied; the scheduler waits for one that is."""
        self.last_norm = None
        self.steps += 1
        self.skipped += 1

    @property
    def state(self) -> StatePart:
        """The part of a stage's state that is the counts of steps, and where the scheduler stands."""
        return StatePart("counters", get=self._counts, set=self._count)

    def _counts(self) -> dict[str, int]:
        return {"steps": self.steps, "skipped": self.skipped, "scheduled": self._scheduler.num_steps}

    def _count(self, counts: Mapping[str, int]) -> None:
        self.steps, self.skipped = counts["steps"], counts["skipped"]
        self._scheduler.num_steps = counts["scheduled"]


class MegatronNorm(TrueNorm):
    """The norm over all stages, in Megatron's order of roundings: that of the groups of its optimizer ``wrapped``.

    ``elsewhere``: parameters that are another stage's too, which counts them.
    """

    def __init__(self, wrapped: torch.optim.Optimizer, elsewhere: AbstractSet[torch.Tensor]) -> None:
        super().__init__(elsewhere)
        self._wrapped = wrapped

    def share(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> float:
        """The squared norm of this stage's gradients, by Megatron's own function for them."""
        ordered = [one for group in self._wrapped.param_groups for one in group["params"]]
        counted = [gradients[one].detach() for one in ordered if one in gradients and one not in self._elsewhere]
        if not counted:
            return 0.0
        overflow = torch.zeros(1, dtype=torch.int, device=counted[0].device)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [counted], False)
        return float(norm**2.0)

    def total(self, shares: Mapping[str, float]) -> torch.Tensor:
        """The norm over all stages, a scalar, from the squared shares, added in fp32 in the order of Gloo's ring."""
        total = torch.zeros((), dtype=torch.float32)
        for stage in sorted(shares, key=int, reverse=True):
            total += shares[stage]
        return torch.tensor(total.item() ** 0.5, dtype=torch.float64)


class MegatronScale:
    """The loss scale by Megatron's ``grad_scaler``, whose numbers are copied here: they are what a step changes."""

    __slots__ = ("__dict__", "_scaler")

    def __init__(self, grad_scaler: Any) -> None:
        self._scaler = grad_scaler
        self._take()

    def update_scale(self, overflow: bool) -> None:
        """Change the scale by Megatron's rule, after a step that was applied, or, on ``overflow``, skipped."""
        self.put()
        self._scaler.update(overflow)
        self._take()

    def put(self) -> None:
        """Give Megatron's object these numbers, which an undo may have changed."""
        self._scaler._scale.fill_(self.loss_scale)
        if hasattr(self._scaler, "_growth_tracker"):
            self._scaler._growth_tracker, self._scaler._hysteresis_tracker = self.growth, self.hysteresis

    def _take(self) -> None:
        self.loss_scale = float(self._scaler.scale)
        self.growth = getattr(self._scaler, "_growth_tracker", 0)
        self.hysteresis = getattr(self._scaler, "_hysteresis_tracker", 0)


def masters_of(module: nn.Module, inner: Any) -> Masters | None:
    """The masters of a model in bf16 or fp16; None in fp32."""
    if not hasattr(inner, "fp32_from_float16_groups"):
        return None
    weights, masters = trained(module), master_of(inner)
    return Masters(weights, [masters(weight) for weight in weights])


def master_of(inner: Any) -> Callable[[nn.Parameter], nn.Parameter]:
    """A function from weights to what Megatron's optimizer ``inner`` steps for them: in fp32 they themselves."""
    groups = zip(getattr(inner, "float16_groups", ()), getattr(inner, "fp32_from_float16_groups", ()))
    pairs = {weight: master for weights, masters in groups for weight, master in zip(weights, masters)}
    return lambda weight: pairs.get(weight, weight)


def tied_weights(
    layers: nn.Module, tied: bool, stages: int, replicas: int, view: ControlView, masters: Masters | None
) -> list[TiedWeight]:
    """The word embedding that first and last stage share, where they do.  All workers call it: it makes a group."""
    if not tied or stages == 1:
        return []
    ends = range(replicas), range((stages - 1) * replicas, stages * replicas)
    group = dist.new_group([rank for stage in ends for rank in stage])
    if not any(view.rank in stage for stage in ends):
        return []
    weight = layers.shared_embedding_or_output_weight()  # type: ignore[operator]
    return [
        TiedWeight("word_embeddings", weight if masters is None else masters.of(weight), (0, stages - 1), group, view)
    ]
