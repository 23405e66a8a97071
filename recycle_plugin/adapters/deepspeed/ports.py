"""What DeepSpeed lends a worker's step (runtime/stage/ports.py): buckets, step, fp32 norm, loss scaler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.utils import is_model_parallel_parameter

from recycle_plugin.adapters.deepspeed.cpu_adam import make_stateless
from recycle_plugin.adapters.deepspeed.rank0 import replaced
from recycle_plugin.runtime.collectives.group import MemberGroup
from recycle_plugin.runtime.stage.clipping import squared_norm
from recycle_plugin.runtime.stage.ports import Clip, Scaler
from recycle_plugin.runtime.state.stage_state import StatePart


@dataclass(frozen=True)
class StockBuckets:
    """Sums gradients over ``group`` by a DeepSpeed engine's functions. ``averages``: divides sums by the replicas."""

    averages: bool
    group: MemberGroup
    allreduce_bucket: Callable[..., torch.Tensor]
    flatten: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    unflatten: Callable[[torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    limit: int = MEMORY_OPT_ALLREDUCE_SIZE

    def all_reduce(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the flat sum of ``gradients``. ``allreduce_bucket`` would sum a single one in its own memory."""
        alone = len(gradients) == 1
        return self.allreduce_bucket([gradients[0].clone()] if alone else gradients, self.group)


class StockOptimizer:
    """The optimizer step of a DeepSpeed ``engine``, which keeps all that it changes: counters, scheduler, current
    optimizer. ``apply`` is stock code's step, which also counts.
    """

    def __init__(self, engine: Any, apply: Callable[[Clip], None]) -> None:
        self._engine, self._apply = engine, apply
        make_stateless(self.wrapped)

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        return self._engine.basic_optimizer

    @property
    def steps(self) -> int:
        """The steps that DeepSpeed has counted, including those of a checkpoint's job."""
        return self._engine.global_steps

    def apply(self, clip: Clip) -> None:
        """Step by stock code, which clips by ``clip``, counts, and steps the scheduler."""
        self._apply(clip)

    def pass_over(self) -> None:
        """Count a step that is over, and step the scheduler as if no step had been skipped. No weight changes."""
        engine = self._engine
        engine.global_steps += 1
        engine.global_samples += engine.train_batch_size()
        if engine.lr_scheduler is not None:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # no optimizer step came before
                try:
                    engine.lr_scheduler.step()
                except TypeError:  # as in stock code
                    engine.lr_scheduler.step(engine.train_batch_size())

    def skip(self) -> None:
        """Have DeepSpeed count a step as one that overflowed. No weight changes."""
        with replaced(self._engine, optimizer=Skipped(self._engine.optimizer)):
            self.apply(lambda: None)


class Skipped:
    """Stands in for the optimizer in a step that is not applied, so that stock code counts an overflow of fp16."""

    overflow = True

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = optimizer.param_groups
        if hasattr(optimizer, "_global_grad_norm"):
            self._global_grad_norm = float("inf")

    def step(self) -> None:
        """Do nothing: the step is skipped."""

    def zero_grad(self) -> None:
        """Do nothing: the gradients are already dropped."""


class StockNorm:
    """The gradient norm that stock DeepSpeed 0.19 computes in fp32, kept for comparisons. It takes a pipeline for a
    tensor-parallel group. So it counts the first stage whole, and of the others only tensor-parallel parameters
    (megatron-core's parallel linears are), and averages these over the replicas.
    """

    def __init__(self, stage: int, replicas: int) -> None:
        self._stage, self._replicas = stage, replicas

    def share(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> float:
        """Return the squared norm of the gradients of this stage that stock counts."""
        return squared_norm(
            [each for one, each in gradients.items() if not self._stage or is_model_parallel_parameter(one)]
        )

    def total(self, shares: Mapping[str, float]) -> torch.Tensor:
        """Return the norm over all stages, a scalar, rounded in stock's order."""
        squares = torch.tensor(shares["0"])
        for stage in range(1, len(shares)):
            squares += torch.tensor(shares[str(stage)])
        share = squares.pow(1.0 / 2.0) * 1.0 / float(self._replicas)
        total = share.clone()
        for _ in range(self._replicas - 1):
            total += share
        return total


def loss_scaler(fp16: Any) -> Scaler:
    """Return DeepSpeed's loss scaler for its section ``fp16``, enabled or not."""
    return CreateLossScaler(
        torch.half,
        fp16.loss_scale,
        fp16.loss_scale == 0,
        {
            "init_scale": 2.0**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        },
    )


COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def counters_part(engine: Any, names: tuple[str, ...] = COUNTERS) -> StatePart:
    """Return the counts that stock code keeps of steps, under these ``names``, as a part of a stage's state."""

    def count(counts: Mapping[str, int]) -> None:
        for name, value in counts.items():
            setattr(engine, name, value)

    return StatePart("counters", get=lambda: {name: getattr(engine, name) for name in names}, set=count)
