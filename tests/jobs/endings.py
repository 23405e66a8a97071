"""What each rank of a job leaves behind, and how scripts wait for a test's word."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

PATIENCE_S = 150.0


def leave(folder: str | Path, record: dict, module: torch.nn.Module | None = None) -> None:
    """This rank's record in folder/losses/rank<r>.json, and the weights of ``module`` in folder/parameters."""
    name = f"rank{os.environ['RANK']}"
    if module is not None:
        write(Path(folder) / "parameters" / f"{name}.pt", lambda path: torch.save(module.state_dict(), path))
    whole = {"rank": int(os.environ["RANK"]), "pid": os.getpid()} | record
    write(Path(folder) / "losses" / f"{name}.json", lambda path: path.write_text(json.dumps(whole)))


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Under another name first: who comes back late may be ended at any time, once all others have left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    save(unfinished)
    unfinished.replace(path)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"there is no {file} after {PATIENCE_S:.0f} s")
        time.sleep(0.02)
