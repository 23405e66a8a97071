"""A pipeline of the toy framework (tests/support/toy_framework.py), by the overrides of tests/jobs/plain.py."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import endings
import torch
import wrappers
from omegaconf import OmegaConf
from torch import nn

sys.path.append(str(Path(__file__).parents[2]))
from recycle_plugin.core.vocabulary.topology import Topology
from tests.support.toy_framework import toy_trainer

WIDTH = 16
DEFAULTS = {
    "topology": {"replicas": 2, "stages": 2, "micro_batches": 2},
    "model": {"layers": 2},
    "steps": 20,
    "gradient_clipping": 0.0,
    "run_dir": "",
    "save_at": [],
    "load": "",
    "recycle": {},
}


def batch(step: int, replica: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(hash((step, replica, micro_batch)))
    inputs = torch.randn(4, WIDTH, generator=generator)
    return inputs, inputs.roll(1, -1).sin()


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


def main() -> None:
    job = OmegaConf.merge(DEFAULTS, OmegaConf.from_dotlist([text.lstrip("+") for text in sys.argv[1:]]))
    for wrap in json.loads(os.environ.get("RECYCLE_TEST_WRAP", "[]")):
        getattr(wrappers, wrap.pop("name"))(**wrap)
    shape = Topology(job.topology.replicas, job.topology.stages, job.topology.micro_batches)
    section = OmegaConf.to_container(job.recycle) | {"run_dir": job.run_dir}
    layers = [partial(block)] * (job.model.layers * shape.stages)
    trainer, framework = toy_trainer(layers, nn.functional.mse_loss, batch, shape, job.gradient_clipping, section)
    if job.load:
        trainer.begin_loading("load")
        with trainer.lifted():
            framework.checkpoints.read(trainer.state, Path(job.load))
            trainer.loaded(whole=True)
    record = {"losses": []}
    while trainer.step < job.steps:
        record["losses"].append(trainer.train())
        if trainer.step in job.save_at:
            trainer.save(Path(job.run_dir) / "saved")
    trainer.settle()
    assert all(parameter.grad is None for parameter in framework.model.module.parameters())
    endings.leave(job.run_dir, record, framework.model.module)


if __name__ == "__main__":
    main()
