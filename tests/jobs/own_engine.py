"""A user's own script, with a learning-rate scheduler and an engine class of its own.

RECYCLE_TEST_OWN holds as JSON: ``folder``; ``enabled``; ``faults``; ``scheduler``, "config" or "callback"; ``engine``,
"" for DeepSpeed's own; ``gate``, arguments of wrappers.gate; ``batch_sizes``, to which the job's is changed after these
steps (``more on rank 0``: so much is asked for more there); ``settings`` of the plugin's.  Each rank writes what it saw
to folder/losses/rank<r>.json.
"""

from __future__ import annotations

import json
import os

import deepspeed
import endings
import torch
import wrappers
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from samples import Samples

REPLICAS, STEPS, WIDTH = 3, 9, 8
job = json.loads(os.environ["RECYCLE_TEST_OWN"])


class Counting(PipelineEngine):
    """Counts its steps, as the losses have come back."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.seen = []

    def train_batch(self, data_iter=None):
        loss = super().train_batch(data_iter)
        self.seen.append(loss.item())
        return loss


class Scheduling(PipelineEngine):
    """Does something else in the forward pass."""

    def _exec_forward_pass(self, buffer_id) -> None:
        super()._exec_forward_pass(buffer_id)


if job["gate"]:
    wrappers.gate(**job["gate"])
if job["engine"]:
    deepspeed.PipelineEngine = {"counting": Counting, "scheduling": Scheduling}[job["engine"]]
deepspeed.init_distributed()
torch.manual_seed(7)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "recycle": {
        "enabled": job["enabled"],
        "run_dir": job["folder"],
        "report": False,
        "faults": job["faults"] if job["enabled"] else [],
    }
    | job["settings"],
}
more = {}
if job["scheduler"] == "config":
    config["scheduler"] = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": STEPS, "warmup_type": "linear"},
    }
else:
    more["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
layers = [
    LayerSpec(torch.nn.Linear, WIDTH, WIDTH),
    LayerSpec(torch.nn.Tanh),
    LayerSpec(torch.nn.Linear, WIDTH, WIDTH),
    LayerSpec(torch.nn.Linear, WIDTH, WIDTH),
]
model = PipelineModule(
    layers,
    topology=PipeDataParallelTopology(2, REPLICAS),
    loss_fn=torch.nn.functional.mse_loss,
    partition_method="uniform",
    seed_layers=True,
)
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config, training_data=Samples(WIDTH), **more
)
record = {"losses": [], "rates": [], "engine": type(engine).__name__}
for step in range(STEPS):
    if str(step) in job["batch_sizes"]:
        engine.set_train_batch_size(
            job["batch_sizes"][str(step)]
            + (job["batch_sizes"].get("more on rank 0", 0) if engine.global_rank == 0 else 0)
        )
    record["losses"].append(engine.train_batch().item())
    record["rates"] += engine.get_lr()
record["seen"] = getattr(engine, "seen", None)
endings.leave(job["folder"], record)
