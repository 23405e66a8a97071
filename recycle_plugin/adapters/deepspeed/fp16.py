"""The optimizer's state and the loss scale in fp16 jobs: whole on every worker, in DeepSpeed's formats in files.

Stock DeepSpeed has three formats, each with the loss scale. At ZeRO stage 0 the state is in the stage's model file:
FP16_Optimizer (for a fused optimizer) flattens each parameter group, FP16_UnfusedOptimizer stores it by parameter. At
stage 1 each replica writes a part, much as in bf16 (bf16.py).
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
"""The scaler's attributes in stage 0's files; DeepSpeed's own optimizers there ignore the hysteresis."""
GROUPS, FLAT_GROUPS = "fp32_groups", "fp32_groups_flat"


class HalfOptimizer(MasterOptimizer):
    """Stands in for stock's FP16_Optimizer or FP16_UnfusedOptimizer: writes the state of the one that would be there,
    and reads either. ``scaler``: the loss scale; ``clipping``: the limit of the norm, for files.
    """

    overflow = False  # applied steps have none: steps that overflow do not get here

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
        """The factor that losses are multiplied by, for scripts and monitors."""
        return self._scaler.loss_scale

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of stock's optimizer, for a checkpoint."""
        groups = self._flat.groups
        spans = [(0, sum(master.numel() for master in group)) for group in groups]
        return {
            DYNAMIC: self._scaler.dynamic,
            "cur_iter": 0,  # a static scale counts none
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
        """Load a state that one of stock's two optimizers has saved. Stock code calls this only if the state is wanted.
        Raises RecycleError for the state of another model, or another kind of loss scale.
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
                "load_checkpoint: the checkpoint's parameter groups are not this job's; load a checkpoint of the same "
                "model with the same stages"
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
    """Whether a model file's optimizer state is of fp16 at ZeRO stage 0; None or {} means that it is in other files."""
    return state is not None and DYNAMIC in state
