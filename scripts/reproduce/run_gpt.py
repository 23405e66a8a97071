"""The real training of the paper's runs, with kills at the times of a failure trace.

deepspeed --hostfile HOSTS --module recycle_plugin.launch scripts/reproduce/run_gpt.py experiment=gpt3_6_7b faults=trace
deepspeed --num_gpus 4 --module recycle_plugin.launch scripts/reproduce/run_gpt.py experiment=gpt_tiny faults=trace

Trains as scripts/train_gpt.py does; every rank that gets to the end also writes run_dir/log/rank<r>.csv: step, loss,
seconds, samples per second.  Without the launcher it trains nothing: it builds the model on the meta device, and
prints what each stage will hold and which workers the trace kills.

scripts/reproduce/run_gpt.py experiment=gpt3_6_7b faults=trace --megatron runs/megatron

prints the command that trains the same shape by Megatron-LM's own pretrain_gpt.py, with the same kills.
"""

from __future__ import annotations

import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron_flags
import train_gpt
from omegaconf import OmegaConf

from recycle_plugin.core.vocabulary.worker_bytes import WorkerBytes
from recycle_plugin.lab.simulator.peers.kills import of_trace
from recycle_plugin.lab.training.compose import GPTModel, TrainingJob, compose_from_command_line
from recycle_plugin.settings.schema import Settings

MEGATRON = "--megatron"  # and a folder for its settings

OmegaConf.register_new_resolver("trace_kills", of_trace, replace=True)  # configs/faults/trace.yaml


def main() -> None:
    if "RANK" not in os.environ and MEGATRON in sys.argv[1:-1]:
        place = sys.argv.index(MEGATRON)
        overrides = [*sys.argv[1:place], *sys.argv[place + 2 :]]
        print(megatron_flags.write(compose_from_command_line(overrides, __doc__), Path(sys.argv[place + 1])))
        return
    if "RANK" not in os.environ:
        check(compose_from_command_line(sys.argv[1:], __doc__))
        return
    job = compose_from_command_line(sys.argv[1:], __doc__, int(os.environ["WORLD_SIZE"]))
    path = Path(job.run_dir) / "log" / f"rank{train_gpt.RANK}.csv"
    path.unlink(missing_ok=True)
    record = train_gpt.run(job)
    train_gpt.write(path, lambda unfinished: write_log(unfinished, record, job))


def write_log(path: Path, record: dict[str, Any], job: TrainingJob) -> None:
    samples = job.topology.replicas * job.topology.micro_batches * job.micro_batch_size
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "loss", "seconds", "samples/s"))
        for step, (loss, seconds) in enumerate(zip(record["losses"], record["step_s"]), 1):
            writer.writerow((step, f"{loss:.6f}", f"{seconds:.4f}", f"{samples / seconds:.3f}"))


# --- without the launcher --------------------------------------------------------------------------------


def check(job: TrainingJob) -> None:
    from common import Column, Table

    if not isinstance(job.model, GPTModel):
        raise SystemExit("run_gpt: model.kind is emulated; choose an experiment with a GPT")
    columns = (
        Column("stage"),
        Column("layers"),
        Column("parameters, M", "", 1),
        Column("state GB", "", 2),
        Column("undo GB", "", 2),
        Column("one micro-batch GB", "", 2),
        Column("held"),
        Column("all GB", "", 1),
    )
    table = Table(f"{job.workers} workers: DP={job.topology.replicas} x PP={job.topology.stages}, fp32", columns)
    for stage, worker in enumerate(workers_on_meta(job)):
        parts = (worker.state_bytes, worker.undo_bytes, worker.activation_bytes)
        table.add(
            stage,
            worker.layers,
            worker.parameters / 1e6,
            *(size / 1e9 for size in parts),
            worker.held,
            worker.bytes / 1e9,
        )
    faults = job.recycle["faults"]
    print(
        table.text(
            [
                "state: fp32 weights, Adam's moments, the last sum of gradients, contributions to the next; undo: what "
                "takes a step back; activations: an estimate, attention not fused",
                f"kills: {', '.join(faults) or 'none'}",
                "nothing was trained: start it with deepspeed … --module recycle_plugin.launch",
            ]
        )
    )


@dataclass(frozen=True)
class Worker:
    """The memory of a worker of one stage. ``held``: micro-batches at once; ``undo``: as in the settings."""

    layers: int
    parameters: int
    activation_bytes: int
    held: int
    undo: str

    @property
    def undo_bytes(self) -> int:
        return self._held["undo"]

    @property
    def state_bytes(self) -> int:
        return sum(self._held.values()) - self.undo_bytes

    @property
    def bytes(self) -> int:
        return sum(self._held.values()) + self.held * self.activation_bytes

    @property
    def _held(self) -> dict[str, int]:
        return WorkerBytes(self.parameters, "fp32", self.undo).computing()


def workers_on_meta(job: TrainingJob) -> list[Worker]:
    settings, stages, each = Settings.from_section(job.recycle), job.topology.stages, activation_bytes(job)
    policy = settings.policy(False, stages)
    return [
        Worker(layers, parameters, layers * each, policy.cap(stage, stages), settings.undo)
        for stage, (layers, parameters) in enumerate(stages_on_meta(job))
    ]


def stages_on_meta(job: TrainingJob) -> list[tuple[int, int]]:
    """Return (layers, parameters) of each stage, from the layers that will be trained, built without memory."""
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.utils import partition_uniform

    from recycle_plugin.lab.training.gpt import GPTShape, gpt_layers

    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        specs = gpt_layers(GPTShape(**job.model.model_dump(exclude={"kind"})), seed=job.seed)
        with torch.device("meta"):
            counts = [
                sum(parameter.numel() for parameter in spec.build().parameters())
                for spec in (specs[0], specs[1], specs[-1])
            ]
    finally:
        if alone:
            dist.destroy_process_group()
    every = [counts[0], *[counts[1]] * job.model.layers, counts[2]]
    bounds = partition_uniform(len(every), job.topology.stages)
    return [(end - begin, sum(every[begin:end])) for begin, end in zip(bounds, bounds[1:])]


def activation_bytes(job: TrainingJob) -> int:
    """Return bytes of a layer and micro-batch: 34 bytes a token and hidden unit in bf16 (Korthikanti et al.

    2022) and the attention scores, doubled for fp32.
    """
    model = job.model
    tokens = model.sequence * job.micro_batch_size
    return 2 * (34 * tokens * model.hidden + 5 * model.heads * model.sequence * tokens)


if __name__ == "__main__":
    main()
