"""The place in which a stage of ``scripts/on_gpu`` runs and leaves its results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StagePlace:
    """The place of one stage. ``device``: its kind, such as "cuda"; ``out``: the folder of all stages; ``folder``: of
    this stage; ``rehearsal``: only the code is tried, so everything is small and no figure means anything.
    """

    device: str
    out: Path
    folder: Path
    rehearsal: bool
