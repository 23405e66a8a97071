"""The optimizer's state and the loss scale in fp16 jobs: whole on every worker, and in DeepSpeed's formats in files.

Stock DeepSpeed has three.  At ZeRO stage 0 the state is in the stage's model file, as its FP16_Optimizer has it (before
a fused optimizer, per parameter group everything flat) or its FP16_UnfusedOptimizer (parameter by parameter); at stage
1 each replica writes a part, much as in bf16 (bf16.py).  The loss scale is in each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import constants as names

from recycle_plugin.adapters.deepspeed.bf16 import FlatState, MasterOptimizer, StateFiles
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.masters import Masters

DYNAMIC = "dynamic_loss_scale"
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "cur_hysteresis")
"""What of a scaler is in files of stage 0; DeepSpeed's own optimizers there know no hysteresis, and do not read it."""
GROUPS, FLAT_GROUPS = "fp32_groups", "fp32_groups_flat"


class HalfOptimizer(MasterOptimizer):
    """Stands where stock code has its FP16_Optimizer or FP16_UnfusedOptimizer, and has their state: it writes that of
    the one that would be there, and reads either.

    ``scaler``: the loss scale; ``clipping``: the limit of the norm, for files.
    """

    overflow = False  # of steps that are applied: those that overflow do not get here

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Masters,
        clip: Callable[[], torch.Tensor | float | None],
        scaler: Any,
        clipping: float,
    ) -> None:
        super().__init__(optimizer, masters, clip)
        self._scaler, self._clipping = scaler, clipping
        self._flat, self._fused = FlatState(optimizer), type(optimizer).__name__ == "FusedAdam"  # stock's rule

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by, for scripts and monitors."""
        return self._scaler.loss_scale

    def state_dict(self) -> dict[str, Any]:
        """The state as stock's optimizer has it, for stock code that saves a checkpoint."""
        groups = self._flat.groups
        spans = [(0, sum(master.numel() for master in group)) for group in groups]
        return {
            DYNAMIC: self._scaler.dynamic,
            "cur_iter": 0,  # of a static scale, which counts none
            **{name: value for name, value in vars(self._scaler).items() if name in SCALE},
            names.CLIP_GRAD: self._clipping,
            **(
                {names.OPTIMIZER_STATE_DICT: self._flat.state_dict(spans), FLAT_GROUPS: self._flat.masters(spans)}
                if self._fused
                else {
                    names.OPTIMIZER_STATE_DICT: self.optimizer.state_dict(),
                    GROUPS: [[master.detach() for master in group] for group in groups],
                }
            ),
        }

    def load_state_dict(self, state: Mapping[str, Any], load_optimizer_states: bool = True) -> None:
        """Stock code's call to load what either of its optimizers has saved; it asks only where the state is wanted.

        Raises RecycleError for that of another model, or another kind of loss scale.
        """
        _check_kind(state[DYNAMIC], self._scaler)
        flat = FLAT_GROUPS in state
        saved = state[FLAT_GROUPS] if flat else state[GROUPS]
        found = [group.numel() if flat else [list(each.shape) for each in group] for group in saved]
        here = [
            sum(each.numel() for each in group) if flat else [list(each.shape) for each in group]
            for group in self._flat.groups
        ]
        if found != here:
            raise RecycleError(
                "load_checkpoint: the parameter groups there are not this job's; load a checkpoint of the same model, "
                "cut into stages alike"
            )
        if flat:
            self._flat.read([saved], [state[names.OPTIMIZER_STATE_DICT]])
        else:
            with torch.no_grad():
                for group, values in zip(self._flat.groups, saved):
                    for master, value in zip(group, values):
                        master.copy_(value)
            self.optimizer.load_state_dict(state[names.OPTIMIZER_STATE_DICT])
        known = vars(self._scaler)
        known.update({name: state[name] for name in SCALE if name in state and name in known})


class ZeroFiles(StateFiles):
    """The optimizer's state, the masters and the loss scale in a checkpoint, in the format of ZeRO stage 1."""

    prefix = names.ZERO_FILE_PREFIX

    def __init__(self, *arguments: Any, scaler: Any) -> None:
        super().__init__(*arguments)
        self._scaler = scaler

    def part(self, number: int, parts: int) -> dict[str, Any]:
        """What replica ``number`` of ``parts`` would write in DeepSpeed's own engine: masters without what fills them
        up.
        """
        made = super().part(number, parts)
        state = made[names.OPTIMIZER_STATE_DICT]
        masters = state[names.SINGLE_PARTITION_OF_FP32_GROUPS]
        filled = [sum(each.numel for each in slices.values()) for slices in state[names.PARAM_SLICE_MAPPINGS]]
        state |= {
            names.LOSS_SCALER: copy.copy(self._scaler),
            DYNAMIC: self._scaler.dynamic,
            "overflow": False,
            names.ZERO_STAGE: 1,
            names.SINGLE_PARTITION_OF_FP32_GROUPS: [flat[:count] for flat, count in zip(masters, filled)],
            names.GROUP_PADDINGS: [flat.numel() - count for flat, count in zip(masters, filled)],
        }
        return made

    def _check(self, parts: list[dict[str, Any]], folder: Path) -> None:
        super()._check(parts, folder)
        _check_kind(parts[0][names.LOSS_SCALER].dynamic, self._scaler)
        for number, part in enumerate(parts):
            if part[names.PARAM_SLICE_MAPPINGS] != self._slices(number, len(parts)):
                raise RecycleError(
                    f"load_checkpoint: {folder / self.name(number)} has the parameters in another order, or padded, as "
                    "zero_optimization.round_robin_gradients and parameter_alignment have them, which is not read; "
                    "load the weights alone with load_module_only=True"
                )

    def _take(self, parts: list[dict[str, Any]]) -> None:
        super()._take(parts)
        vars(self._scaler).update(vars(parts[0][names.LOSS_SCALER]))

    def _numbers(self, parts: list[dict[str, Any]]) -> list[int]:
        masters = (part[names.SINGLE_PARTITION_OF_FP32_GROUPS] for part in parts)
        return [sum(flat.numel() for flat in of_group) for of_group in zip(*masters)]


def is_half(state: Mapping[str, Any] | None) -> bool:
    """Whether the optimizer's state in a model file is of fp16, at stage 0; None, or empty: it is elsewhere."""
    return bool(state) and DYNAMIC in state


def _check_kind(dynamic: bool, scaler: Any) -> None:
    """Stock takes a checkpoint's kind of scale, whatever the config says."""
    if dynamic != scaler.dynamic:
        kinds = {True: "dynamic", False: "static"}
        raise RecycleError(
            f"load_checkpoint: the loss scale there is {kinds[dynamic]}, and fp16.loss_scale makes this job's "
            f"{kinds[scaler.dynamic]}; write {'0' if dynamic else 'the one there'}, or load the weights alone with "
            "load_module_only=True"
        )
