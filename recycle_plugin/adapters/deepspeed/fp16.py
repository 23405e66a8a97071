"""The optimizer's state and the loss scale in fp16 jobs: whole on every worker, and in DeepSpeed's formats in files.

Stock DeepSpeed has three.  At ZeRO stage 0 the state is in the stage's model file, as its FP16_Optimizer has it (before
a fused optimizer, per parameter group everything flat) or its FP16_UnfusedOptimizer (parameter by parameter); at stage
1 each replica writes a part, much as in bf16 (bf16.py).  The loss scale is in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.checkpoint import constants as names

from recycle_plugin.adapters.deepspeed.bf16 import DYNAMIC, FlatState, MasterOptimizer, check_kind
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.masters import Masters

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
        check_kind(state[DYNAMIC], self._scaler)
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


def is_half(state: Mapping[str, Any] | None) -> bool:
    """Whether the optimizer's state in a model file is of fp16, at stage 0; None, or empty: it is elsewhere."""
    return state is not None and DYNAMIC in state
