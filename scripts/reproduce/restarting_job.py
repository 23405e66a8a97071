"""A training job under stock DeepSpeed that starts again from its own checkpoints: plain checkpoint-restart, or as
CheckFreq does.

deepspeed --num_gpus 4 scripts/reproduce/restarting_job.py [key=value ...], with what it is to do in RESTARTING_JOB,
as JSON

Every ``every`` steps each rank saves its stage: ``background`` false: written and synced while all wait (plain); true:
copied in memory, and written by a thread (CheckFreq, FAST'21).  A start takes the newest step that every rank has.  The
rank ``lost`` kills itself before the step ``kill_at``, if that is not null.  Each rank appends to its own file in
``folder`` what happened when; swift_total_time.py reads them.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train_gpt

from recycle_plugin.settings.compose import TrainingJob, compose_from_command_line

VARIABLE = "RESTARTING_JOB"
RANK = train_gpt.RANK


def main() -> None:
    workers = int(os.environ["WORLD_SIZE"])
    job = compose_from_command_line(sys.argv[1:], __doc__, workers)
    train(job, json.loads(os.environ[VARIABLE]), workers)


def train(job: TrainingJob, todo: dict[str, Any], workers: int) -> None:
    """Train up to the job's last step, from the newest checkpoint."""
    folder = Path(todo["folder"])
    engine = engine_of(job)
    told(folder, "ready", 0)
    first = newest(folder, workers)
    if first:
        load(engine, file_of(folder, first, RANK))
    told(folder, "loaded", first)
    saving: threading.Thread | None = None
    for step in range(first + 1, job.steps + 1):
        if step == todo["kill_at"] and todo["lost"] == RANK:
            told(folder, "killed", step)
            os.kill(os.getpid(), signal.SIGKILL)
        engine.train_batch()
        told(folder, "step", step)
        if step % todo["every"] == 0:
            if saving is not None:
                saving.join()
            saving = save(engine, file_of(folder, step, RANK), todo["background"])
    if saving is not None:
        saving.join()


def engine_of(job: TrainingJob) -> Any:
    """The stock engine, as train_gpt.py makes it."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
    from recycle_plugin.patches import deepspeed_cpu

    deepspeed_cpu.apply()
    deepspeed.init_distributed()
    torch.manual_seed(job.seed + RANK)
    layers, loss, data = train_gpt.emulated(job)
    topology = PipeDataParallelTopology(num_pp=job.topology.stages, num_dp=job.topology.replicas)
    model = PipelineModule(layers=layers, topology=topology, loss_fn=loss, partition_method="uniform")
    config = job.deepspeed_config()
    config.pop("recycle", None)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, training_data=data)[0]


# --- checkpoints -------------------------------------------------------------------------------------------


def file_of(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step{step}" / f"rank{rank}.pt"


def newest(folder: Path, workers: int) -> int:
    """The last step that every rank has saved; 0 for none."""
    steps = [int(path.name.removeprefix("step")) for path in folder.glob("step*")]
    whole = [step for step in steps if all(file_of(folder, step, rank).exists() for rank in range(workers))]
    return max(whole, default=0)


def save(engine: Any, path: Path, background: bool) -> threading.Thread | None:
    """Save the stage; the thread that does so, where it is one."""
    state = {"module": engine.module.state_dict(), "optimizer": engine.optimizer.state_dict()}
    if not background:
        write(state, path)
        return None
    thread = threading.Thread(target=write, args=(copy.deepcopy(state), path))
    thread.start()
    return thread


def write(state: dict[str, Any], path: Path) -> None:
    """Under another name first, and synced: who finds the file finds all of it."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load(engine: Any, path: Path) -> None:
    import torch

    state = torch.load(path, weights_only=False)
    engine.module.load_state_dict(state["module"])
    engine.optimizer.load_state_dict(state["optimizer"])


def told(folder: Path, event: str, step: int) -> None:
    with (folder / f"rank{RANK}.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "step": step, "time": time.time()}) + "\n")


if __name__ == "__main__":
    main()
