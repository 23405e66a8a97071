"""Checkpoints in Megatron-LM's format "torch": one file per stage, written by the stage's lowest live worker.

Stock Megatron-LM loads them, and the plugin's jobs load stock's with Megatron's own code.
"""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.ports import CheckpointFormat, CheckpointShare
from recycle_plugin.runtime.state.stage_state import StageState

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class MegatronFiles(CheckpointFormat):
    """The file of one worker's stage, made by Megatron's ``generate_state_dict``. ``in_parts``: write the optimizer's
    state as a distributed optimizer does. ``iteration``, ``operations``: as Megatron's loop counts them.
    """

    seat: Seat
    args: Namespace
    model: list[Any]
    optimizer: Any
    scheduler: Any
    in_parts: bool = False
    iteration: int = 0
    operations: Any = 0

    def at(self, iteration: int, operations: Any) -> MegatronFiles:
        """Return the files of a checkpoint at this point of the loop."""
        return replace(self, iteration=iteration, operations=operations)

    def gather(self, state: StageState, path: Path, share: CheckpointShare) -> None:
        """Hand over the stage's file if this worker writes it."""
        if share.turn == 0:
            share.save(path / self._name / "model_optim_rng.pt", self._contents(state))

    def read(self, state: StageState, folder: Path) -> None:
        """Raise RecycleError: Megatron-LM loads at its start only."""
        raise RecycleError(f"{folder}: a Megatron-LM job reads checkpoints at its start only; start it with --load")

    @property
    def _name(self) -> str:
        stages = self.args.pipeline_model_parallel_size
        return "mp_rank_00" + f"_{self.seat.stage:03d}" * (stages > 1)

    def _contents(self, state: StageState, **more: Any) -> dict[str, Any]:
        from megatron.training.checkpointing import generate_state_dict

        step = self.iteration or state.step
        rng = [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "cuda_rng_state": torch.cuda.get_rng_state(),
                "rng_tracker_states": get_cuda_rng_tracker().get_states(),
            }
        ]
        made = generate_state_dict(self.args, self.model, self.optimizer, self.scheduler, rng, iteration=step, **more)
        return made | {"num_floating_point_operations_so_far": self.operations}
