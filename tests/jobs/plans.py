"""What a job's script does between steps, by a plan (tests/jobs/checkpoint.py says what stands in one), as far as it is
the same with every framework.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from wrappers import TRAINERS, gate, inside, wait_until

from recycle_plugin import folders
from recycle_plugin.runtime.worker.machine import TorchMachine
from recycle_plugin.runtime.worker.trainer import Trainer


def follow(plan: dict) -> None:
    """Changes that a plan of tests/jobs/checkpoint.py asks for, from the start on."""
    if "read_at" in plan:
        gate(plan["flags"], before=f"0REDUCE@{plan['read_at']}", until="", by=["0.1", "1.1"])
    if "flip" in plan:
        flip_loaded(plan["flip"])
    if "full" in plan:
        fill_disk(plan["full"])
    if "wait_at" in plan:
        gate(plan["flags"], before=f"0F0.0@{plan['wait_at']}", until="", by=["go"])
    if plan.get("hold"):
        hold_files(plan["flags"], plan["save_at"][-1])


def told(plan: dict) -> bool:
    """Whether the plan has a file ``until``, and it is there: all workers are told so after the same step."""
    if "until" not in plan:
        return False
    found = torch.tensor([float(Path(plan["until"]).exists())])
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return bool(found.item())


def save(plan: dict, record: dict, save: Callable[[str], object]) -> None:
    """A checkpoint to the plan's folder; with ``catch`` the script goes on where there is none, and records why."""
    try:
        save(plan["folder"])
    except OSError as error:
        if not plan.get("catch"):
            raise
        record.setdefault("refused", []).append(f"{type(error).__name__}: {error}")


def read(plan: dict, record: dict, module: torch.nn.Module) -> None:
    """The parameters, on stage 1, which has returned from the step while stage 0 cannot have applied it."""
    (trainer,), session = TRAINERS, inside().session
    if trainer.seat.stage == 1:
        record["committed_before"] = session.view.committed
        (Path(plan["flags"]) / str(trainer.seat)).touch()
        module.state_dict()
        record["committed_after"] = session.view.committed


def fill_disk(seats: dict[str, str]) -> None:
    """From the first file of the checkpoint of a step on, as long as the training is at that step, there is no room for
    what a seat writes, or for "latest" of whoever writes it.

    ``seats``: by step; a path in place of a step: at every step, as long as there is no such file.
    """
    write = folders.write

    def changed(path: Path, into: Callable, called: Path | None = None) -> None:
        (trainer,) = TRAINERS
        for where, what in seats.items():
            now = trainer.step == int(where) if where.isdigit() else not Path(where).exists()
            if now and what == ("latest" if called else str(trainer.seat)):
                path.symlink_to("/dev/full")
        write(path, into, called)

    folders.write = changed


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
            self._framework.gradients.parameters[0].data.view(torch.int32).view(-1)[3] ^= 1
        loaded(self, whole)

    Trainer.loaded = changed
