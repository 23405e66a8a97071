"""A small pipeline in plain torch, with dropout and Adam, by the overrides of tests/support/jobs.py:
``topology.replicas=2 steps=20 recycle.undo=inverse …``.

``device=standin``: on the stand-in accelerator (tests/support/standin).  RECYCLE_TEST_WRAP: as for gpt.py, those of
wrappers/ and plain_wrappers.py.  RECYCLE_TEST_CHECKPOINT: as for checkpoint.py, but for ``module_only``.
``data``, ``layer``, ``wrong``: what is refused.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path

import endings
import plain_wrappers
import plans
import torch
import wrappers
from omegaconf import OmegaConf
from torch import nn

from recycle_plugin.adapters.plain import Pipeline

TOKENS = 32
DEFAULTS = {
    "topology": {"replicas": 2, "stages": 2, "micro_batches": 2},
    "model": {"layers": 2, "width": 16},
    "steps": 20,
    "gradient_clipping": 0.0,
    "optimizer": "adam",
    "run_dir": "",
    "recycle": {},
    "schedule": False,
    "by_hand": False,
    "dropout": 0.1,
    "parts": None,
    "data": None,
    "layer": "",
    "wrong": "",
    "device": None,
}
plan = json.loads(os.environ.get("RECYCLE_TEST_CHECKPOINT", "{}"))
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow, self.dropout = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("shift", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))
        return x + made * self.scale + self.shift


def batch(step: int, replica: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each number follows from the one before it, most of the time."""
    generator = torch.Generator().manual_seed(hash((step, replica, micro_batch)))
    ids = (torch.arange(TOKENS + 1) * (1 + replica) + torch.randint(0, 3, (1, TOKENS + 1), generator=generator)) % 64
    return ids[:, :-1], ids[:, 1:]


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def between_steps(pipeline, record: dict) -> None:
    step = pipeline.steps
    if step == plan.get("evaluate_at"):
        record["evaluated"] += [pipeline.evaluate(evaluated) for _ in range(plan.get("times", 1))]
    if step in plan.get("save_at", ()):
        plans.save(plan, record, pipeline.save)
    if step == plan.get("load_at"):
        del plan["load_at"]
        pipeline.load(plan["folder"], f"global_step{plan['load_step']}")
    if step == plan.get("read_at"):
        plans.read(plan, record, pipeline.module)


def evaluated(replica: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(0, replica, micro_batch)


def prepare(job) -> None:
    """Change what is to be changed from outside, before anything is made."""
    wrappers.apply(plain_wrappers)
    if job.device == "standin":
        sys.path.append(str(Path(__file__).parents[2]))
        importlib.import_module("tests.support.standin")  # torch finds it from now on
    plans.follow(plan)


def layers_of(job) -> list:
    width = job.model.width
    layers = [
        lambda: nn.Embedding(64, width),
        *[partial(Block, width, job.dropout)] * job.model.layers,
        lambda: nn.Linear(width, 64),
    ]
    if job.layer == "norm":
        layers[1] = lambda: nn.BatchNorm1d(TOKENS)
    if job.layer == "shared":
        layers[1] = layers[2] = Block(width)
    if job.layer == "name":
        layers[1] = "Block"
    if job.layer == "function":
        layers[1] = loss
    if job.layer == "shape":
        layers[-1] = lambda: nn.Linear(width + 1, 64)
    return layers


def pipeline_of(job) -> Pipeline:
    optimizer, scheduler = OPTIMIZERS[job.optimizer], None
    if job.schedule:
        scheduler = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))
    if job.wrong == "optimizer":
        optimizer = optimizer([torch.zeros(2, requires_grad=True)])
    if job.wrong == "plateau":
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau
    return Pipeline(
        layers_of(job),
        loss,
        optimizer,
        job.data or batch,
        job.topology.stages,
        job.topology.micro_batches,
        parts=job.parts,
        scheduler=scheduler,
        clip=job.gradient_clipping,
        settings=OmegaConf.to_container(job.recycle) | {"run_dir": job.run_dir},
        device=job.device,
    )


def go_wrong(job, pipeline: Pipeline) -> None:
    """End as the job says, if it is to end after this step."""
    if job.wrong == f"raise {pipeline.seat} after {pipeline.steps}":
        raise ValueError("two\nlines")
    if job.wrong == f"exit {pipeline.seat} after {pipeline.steps}":
        sys.exit(5)
    if job.wrong in (f"vanish after {pipeline.steps}", f"vanish {pipeline.seat} after {pipeline.steps}"):
        os._exit(0)


def set_by_hand(pipeline: Pipeline) -> None:
    """A learning rate, and a number and buffers that a layer computes with, for the next step."""
    for group in pipeline.optimizer.param_groups:
        group["lr"] = 1e-3 / (1 + pipeline.steps % 4)
    for part in pipeline.module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.05 * (pipeline.steps % 5)
        if isinstance(part, Block):
            part.scale.fill_(1 + pipeline.steps % 3 / 4)
            part.shift = torch.full((1,), 0.1 * (pipeline.steps % 7))


def train(job, pipeline: Pipeline) -> dict:
    """What is recorded of all steps, and of what the plan has for between them."""
    record = {"losses": [], "evaluated": [], "deepspeed": "deepspeed" in sys.modules}
    if plan.get("load"):
        pipeline.load(plan["folder"])
        record["evaluated"].append(pipeline.evaluate(evaluated))
    while pipeline.steps < job.steps and not plans.told(plan):
        if job.by_hand:
            set_by_hand(pipeline)
        record["losses"].append(pipeline.step())
        go_wrong(job, pipeline)
        between_steps(pipeline, record)
    return record


def main() -> None:
    # Hydra, which reads those of DeepSpeed jobs, asks for a + where there is no default
    overrides = [text.lstrip("+") for text in sys.argv[1:]]
    job = OmegaConf.merge(DEFAULTS, OmegaConf.from_dotlist(overrides))
    prepare(job)
    pipeline = pipeline_of(job)
    record = train(job, pipeline)
    endings.leave(job.run_dir, record, pipeline.module)


if __name__ == "__main__":
    main()
