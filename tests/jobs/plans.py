"""What a job's script does between steps, by a plan (tests/jobs/checkpoint.py says what stands in one), as far as it is the same with every framework."""

from __future__ import annotations

from pathlib import Path

import torch

from recycle_plugin.runtime.worker.trainer import Trainer
from recycle_plugin.runtime.world import TorchMachine
from wrappers import TRAINERS, gate, wait_until


def follow(plan: dict) -> None:
    """Changes that a plan of tests/jobs/checkpoint.py asks for, from the start on."""
    if "read_at" in plan:
        gate(plan["flags"], before=f"0REDUCE@{plan['read_at']}", until="", by=["0.1", "1.1"])
    if "flip" in plan:
        flip_loaded(plan["flip"])
    if plan.get("hold"):
        hold_files(plan["flags"], plan["save_at"][-1])


def told(plan: dict) -> bool:
    """Whether the plan has a file ``until``, and it is there: all workers are told so after the same step."""
    if "until" not in plan:
        return False
    found = torch.tensor([float(Path(plan["until"]).exists())])
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return bool(found.item())


def hold_files(folder: str, step: int) -> None:
    """Whoever has written a file of the checkpoint of ``step`` waits for the file ``folder``/go."""
    reach = TorchMachine.reach

    def changed(self: TorchMachine, when: str, seat=None, instruction=None) -> None:
        if when == "checkpoint.file" and TRAINERS[0].step == step:
            wait_until((Path(folder) / "go").exists, f"{folder}/go")
        reach(self, when, seat, instruction)

    TorchMachine.reach = changed


def flip_loaded(seat: str) -> None:
    """The lowest bit of one of the worker's parameters turns round while it loads a checkpoint."""
    loaded = Trainer.loaded

    def changed(self: Trainer, whole: bool) -> None:
        if str(self.seat) == seat:
            self._framework.parameters[0].data.view(torch.int32).view(-1)[3] ^= 1
        loaded(self, whole)

    Trainer.loaded = changed
