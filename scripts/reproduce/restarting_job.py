"""A training job under stock DeepSpeed that restarts from its own checkpoints, plain or in the background (CheckFreq).

deepspeed --num_gpus 4 scripts/reproduce/restarting_job.py [key=value ...], with its task as JSON in
RESTARTING_JOB

Every ``every`` steps (0: never) each rank saves its stage. ``background`` false: written and synced while all wait
(plain); true: copied in memory, and written by a thread (CheckFreq, FAST'21). A start takes the newest step that
every rank has, and that step's data. The rank ``lost`` kills itself before the step ``kill_at``, unless that is null.
Each rank appends its events with their times to its own file in ``folder``; swift_jobs.py reads them.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stock_job import RANK, StockJob, told

from recycle_plugin.lab.training.compose import TrainingJob, compose_from_command_line

VARIABLE = "RESTARTING_JOB"


def main() -> None:
    workers = int(os.environ["WORLD_SIZE"])
    job = compose_from_command_line(sys.argv[1:], __doc__, workers)
    train(job, json.loads(os.environ[VARIABLE]), workers)


def train(job: TrainingJob, todo: dict[str, Any], workers: int) -> None:
    """Train up to the job's last step, from the newest checkpoint."""
    folder, stock = Path(todo["folder"]), StockJob(job)
    stock.start()
    told(folder, "ready")
    first = newest(folder, workers)
    if first:
        load(stock, file_of(folder, first, RANK))
    told(folder, "loaded", first)
    saving: threading.Thread | None = None
    for step in range(first + 1, job.steps + 1):
        if step == todo["kill_at"] and todo["lost"] == RANK:
            told(folder, "killed", step)
            os.kill(os.getpid(), signal.SIGKILL)
        told(folder, "step", step, loss=stock.train(step))
        if todo["every"] and step % todo["every"] == 0:
            if saving is not None:
                saving.join()
            saving = save(stock.state(), folder, step, todo["background"])
            told(folder, "saved", step)
    if saving is not None:
        saving.join()


# --- checkpoints -------------------------------------------------------------------------------------------


def file_of(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step{step}" / f"rank{rank}.pt"


def newest(folder: Path, workers: int) -> int:
    """Return the last step that every rank has saved; 0 if there is none."""
    steps = [int(path.name.removeprefix("step")) for path in folder.glob("step*")]
    whole = [step for step in steps if all(file_of(folder, step, rank).exists() for rank in range(workers))]
    return max(whole, default=0)


def save(state: dict[str, Any], folder: Path, step: int, background: bool) -> threading.Thread | None:
    """Save the stage; return the thread that does so, if there is one."""
    if not background:
        write(state, folder, step)
        return None
    thread = threading.Thread(target=write, args=(copy.deepcopy(state), folder, step))
    thread.start()
    return thread


def write(state: dict[str, Any], folder: Path, step: int) -> None:
    """Write the file under another name first, and sync it, so that a file with its final name is whole."""
    import torch

    path = file_of(folder, step, RANK)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    told(folder, "durable", step)


def load(stock: StockJob, path: Path) -> None:
    import torch

    stock.take(torch.load(path, weights_only=False))


if __name__ == "__main__":
    main()
