"""Train a GPT (or emulated layers) with DeepSpeed's pipeline engine, with the plugin or without.

deepspeed --num_gpus 4 --module recycle_plugin.launch scripts/train_gpt.py topology=pp2_dp2 recycle.enabled=true
deepspeed --num_gpus 4 scripts/train_gpt.py topology=pp2_dp2

Every rank that trains to the end writes run_dir/losses/rank<r>.json, its last file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from recycle_plugin.lab.training.compose import GPTModel, IndexedFiles, TrainingJob, compose_from_command_line

RANK = int(os.environ.get("RANK", 0))


def main() -> None:
    run(compose_from_command_line(sys.argv[1:], __doc__, int(os.environ.get("WORLD_SIZE", 1))))


def run(job: TrainingJob) -> dict:
    """Train, write this rank's files, and return its record."""
    outputs = {
        name: Path(job.run_dir) / name / f"rank{RANK}{suffix}"
        for name, suffix in (("losses", ".json"), ("parameters", ".pt"))
    }
    for path in outputs.values():  # an earlier run's file must not stand for a rank that dies in this one
        path.unlink(missing_ok=True)
    record, engine = train(job)
    if job.save_parameters:
        import torch

        write(outputs["parameters"], lambda path: torch.save(engine.module.state_dict(), path))
    write(outputs["losses"], lambda path: path.write_text(json.dumps(record)))
    return record


def train(job: TrainingJob):
    """Run the job; return this rank's record (loss and seconds of each step) and its engine."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    from recycle_plugin.patches import deepspeed_cpu

    deepspeed_cpu.apply()
    deepspeed.init_distributed()
    torch.manual_seed(job.seed + RANK)
    layers, loss, data = gpt(job) if isinstance(job.model, GPTModel) else emulated(job)
    topology = PipeDataParallelTopology(num_pp=job.topology.stages, num_dp=job.topology.replicas)
    model = PipelineModule(layers=layers, topology=topology, loss_fn=loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=job.deepspeed_config(), training_data=data
    )
    losses, seconds = [], []
    for _ in range(job.steps):
        start = time.monotonic()
        losses.append(engine.train_batch().item())
        seconds.append(time.monotonic() - start)
    return {"rank": RANK, "pid": os.getpid(), "losses": losses, "step_s": seconds}, engine


def gpt(job: TrainingJob):
    """Return (layers, loss, data): a GPT of megatron-core layers on byte-level text, or on tokens made by Megatron's
    tools.
    """
    import torch

    from recycle_plugin.lab.training.gpt import GPTShape, gpt_layers, gpt_loss
    from recycle_plugin.lab.training.indexed import IndexedWindows
    from recycle_plugin.lab.training.text import TextWindows

    shape = GPTShape(**job.model.model_dump(exclude={"kind"}))
    if isinstance(job.data, IndexedFiles):
        data = IndexedWindows(job.data.path, shape.sequence, shape.vocabulary)
    else:
        data = TextWindows(job.data.path, shape.sequence, job.data.limit_bytes)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[job.precision]
    return gpt_layers(shape, dtype, job.seed), gpt_loss, data


def emulated(job: TrainingJob):
    """Return (layers, loss, data): layers that take a stated time, on random vectors."""
    import torch
    from deepspeed.pipe import LayerSpec

    from recycle_plugin.lab.training.emulated import EmulatedLayer

    model = job.model
    slower = model.slow_times if model.slow_rank == RANK else 1
    times = [slower * milliseconds / 1000 for milliseconds in (model.forward_ms, model.input_ms, model.weight_ms)]
    layers = [LayerSpec(EmulatedLayer, model.width, *times) for _ in range(model.layers)]
    vectors = torch.randn(1024, model.width, generator=torch.Generator().manual_seed(job.seed))
    return layers, torch.nn.functional.mse_loss, torch.utils.data.TensorDataset(vectors, vectors.flip(1))


def write(path: Path, save) -> None:
    """Write the file under another name first, so that a file with its final name is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    save(unfinished)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
