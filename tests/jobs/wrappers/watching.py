"""Notes of what a worker does, which change nothing of it."""

from __future__ import annotations

import os
from pathlib import Path

from recycle_plugin.runtime.stage.gradients import Gradients
from wrappers.trainers import TRAINERS


def record_states(folder: str) -> None:
    """After each optimizer step its number and the hash of all that it changes go to folder/rank<r>.txt."""
    apply = Gradients.apply
    path = Path(folder) / f"rank{os.environ['RANK']}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)

    def changed(self: Gradients, step: int, optimizer, *others) -> None:
        apply(self, step, optimizer, *others)
        with path.open("a") as file:
            file.write(f"{step} {TRAINERS[0].state.digest()}\n")

    Gradients.apply = changed
