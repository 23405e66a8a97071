"""What Megatron-LM lends a worker's step (runtime/stage/ports.py): optimizer, norm, masters, tied weight."""

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
    """Steps Megatron's optimizer ``inner``, and its learning-rate ``scheduler`` by ``samples()`` a step."""

    def __init__(self, inner: Any, scheduler: Any, steps: int, samples: Callable[[], int]) -> None:
        self._inner, self._scheduler, self._samples = inner, scheduler, samples
        self.steps, self.skipped = steps, 0
        self.last_norm: float | None = None  # by which the last step was clipped

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The torch optimizer that changes the weights, or their masters."""
        return self._inner.optimizer

    def apply(self, clip: Clip) -> None:
        """Clip, step, and count the step."""
        norm = clip()
        self.last_norm = None if norm is None else float(norm.float())  # as Megatron's log has it
        self._inner.step_with_ready_grads()
        self.pass_over()

    def pass_over(self) -> None:
        """Count a step that is over, and step the scheduler. No weight changes."""
        self._scheduler.step(increment=self._samples())
        self.steps += 1

    def skip(self) -> None:
        """Count a step that is not applied. The scheduler is not stepped."""
        self.last_norm = None
        self.steps += 1
        self.skipped += 1

    @property
    def state(self) -> StatePart:
        """The counts of steps and the scheduler's position, as a part of a stage's state."""
        return StatePart("counters", get=self._counts, set=self._count)

    def _counts(self) -> dict[str, int]:
        return {"steps": self.steps, "skipped": self.skipped, "scheduled": self._scheduler.num_steps}

    def _count(self, counts: Mapping[str, int]) -> None:
        self.steps, self.skipped = counts["steps"], counts["skipped"]
        self._scheduler.num_steps = counts["scheduled"]


class MegatronNorm(TrueNorm):
    """The norm over all stages, rounded in Megatron's order: that of the groups of its optimizer ``wrapped``.
    ``elsewhere``: parameters that another stage has too, and counts.
    """

    def __init__(self, wrapped: torch.optim.Optimizer, elsewhere: AbstractSet[torch.Tensor]) -> None:
        super().__init__(elsewhere)
        self._wrapped = wrapped

    def share(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> float:
        """Return the squared norm of this stage's gradients, by Megatron's own function."""
        ordered = [one for group in self._wrapped.param_groups for one in group["params"]]
        counted = [gradients[one].detach() for one in ordered if one in gradients and one not in self._elsewhere]
        if not counted:
            return 0.0
        overflow = torch.zeros(1, dtype=torch.int, device=counted[0].device)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [counted], False)
        return float(norm**2.0)

    def total(self, shares: Mapping[str, float]) -> torch.Tensor:
        """Return the norm over all stages, a scalar, adding the squared shares in fp32 in the order of Gloo's ring."""
        total = torch.zeros((), dtype=torch.float32)
        for stage in sorted(shares, key=int, reverse=True):
            total += shares[stage]
        return torch.tensor(total.item() ** 0.5, dtype=torch.float64)


class MegatronScale:
    """The loss scale, by Megatron's ``grad_scaler``. Its numbers are copied here, as state that a step changes."""

    __slots__ = ("__dict__", "_scaler")

    def __init__(self, grad_scaler: Any) -> None:
        self._scaler = grad_scaler
        self._take()

    def update_scale(self, overflow: bool) -> None:
        """Change the scale by Megatron's rule after a step that was applied, or skipped on ``overflow``."""
        self.put()
        self._scaler.update(overflow)
        self._take()

    def put(self) -> None:
        """Copy these numbers, which an undo may have changed, to Megatron's object."""
        self._scaler._scale.fill_(self.loss_scale)
        if hasattr(self._scaler, "_growth_tracker"):
            self._scaler._growth_tracker, self._scaler._hysteresis_tracker = self.growth, self.hysteresis

    def _take(self) -> None:
        self.loss_scale = float(self._scaler.scale)
        self.growth = getattr(self._scaler, "_growth_tracker", 0)
        self.hysteresis = getattr(self._scaler, "_hysteresis_tracker", 0)


def masters_of(module: nn.Module, inner: Any) -> Masters | None:
    """Return the masters of a model in bf16 or fp16; None in fp32."""
    if not hasattr(inner, "fp32_from_float16_groups"):
        return None
    weights, masters = trained(module), master_of(inner)
    return Masters(weights, [masters(weight) for weight in weights])


def master_of(inner: Any) -> Callable[[nn.Parameter], nn.Parameter]:
    """Return a function from a weight to the tensor that the optimizer ``inner`` steps for it; in fp32 the weight
    itself.
    """
    groups = zip(getattr(inner, "float16_groups", ()), getattr(inner, "fp32_from_float16_groups", ()))
    pairs = {weight: master for weights, masters in groups for weight, master in zip(weights, masters)}
    return lambda weight: pairs.get(weight, weight)


def tied_weights(
    layers: nn.Module, tied: bool, stages: int, replicas: int, view: ControlView, masters: Masters | None
) -> list[TiedWeight]:
    """Return the word embedding that first and last stage share, if any. All workers call it: it makes a group."""
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
