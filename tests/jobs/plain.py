"""A small pipeline in plain torch, with dropout and Adam, by the overrides of tests/support/jobs.py: ``topology.replicas=2 steps=20 recycle.undo=inverse …``.

RECYCLE_TEST_WRAP: as for gpt.py, those of wrappers.py.  ``save=N``: a checkpoint in run_dir/saved every N steps, or in ``save_to``; ``load``: the folder to go on from; ``back_at=N``: behind step N, once, back to the first of them;
``evaluate=N``: every N steps; ``data``, ``layer``, ``wrong``: what is refused.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import nn

RANK, WIDTH, TOKENS = os.environ["RANK"], 16, 32
DEFAULTS = {
    "topology": {"replicas": 2, "stages": 2, "micro_batches": 2}, "model": {"layers": 2}, "steps": 20, "gradient_clipping": 0.0, "optimizer": "adam",
    "run_dir": "", "recycle": {}, "save": 0, "save_to": "", "load": "", "back_at": 0, "evaluate": 0, "schedule": False, "parts": None, "data": None, "layer": "", "wrong": "",
}  # fmt: skip
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


def batch(step: int, replica: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each number follows from the one before it, most of the time."""
    generator = torch.Generator().manual_seed(hash((step, replica, micro_batch)))
    ids = (torch.arange(TOKENS + 1) * (1 + replica) + torch.randint(0, 3, (1, TOKENS + 1), generator=generator)) % 64
    return ids[:, :-1], ids[:, 1:]


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def main() -> None:
    job = OmegaConf.merge(DEFAULTS, OmegaConf.from_dotlist(sys.argv[1:]))
    if wraps := json.loads(os.environ.get("RECYCLE_TEST_WRAP", "[]")):
        import wrappers

        for arguments in wraps if isinstance(wraps, list) else [wraps]:
            getattr(wrappers, arguments.pop("name"))(**arguments)
    from recycle_plugin.adapters.plain import Pipeline

    layers = [lambda: nn.Embedding(64, WIDTH), *[Block] * job.model.layers, lambda: nn.Linear(WIDTH, 64)]
    if job.layer == "norm":
        layers[1] = lambda: nn.BatchNorm1d(TOKENS)
    if job.layer == "shared":
        layers[1] = layers[2] = Block()
    if job.layer == "name":
        layers[1] = "Block"
    settings = OmegaConf.to_container(job.recycle) | {"run_dir": job.run_dir}
    scheduler = (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))) if job.schedule else None
    optimizer = OPTIMIZERS[job.optimizer]
    if job.wrong == "optimizer":
        optimizer = optimizer([torch.zeros(2, requires_grad=True)])
    if job.wrong == "plateau":
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau
    pipeline = Pipeline(
        layers, loss, optimizer, job.data or batch, job.topology.stages, job.topology.micro_batches, parts=job.parts, scheduler=scheduler,
        clip=job.gradient_clipping, settings=settings,
    )  # fmt: skip
    record = {"rank": int(RANK), "pid": os.getpid(), "losses": [], "evaluated": [], "deepspeed": "deepspeed" in sys.modules}
    if job.load:
        pipeline.load(job.load)
    while pipeline.steps < job.steps:
        record["losses"].append(pipeline.step())
        if job.save and pipeline.steps % job.save == 0:
            pipeline.save(job.save_to or Path(job.run_dir) / "saved")
        if pipeline.steps == job.back_at:
            pipeline.load(Path(job.run_dir) / "saved", f"global_step{job.save}")
            job.back_at = 0
        if job.evaluate and pipeline.steps % job.evaluate == 0:
            record["evaluated"].append(pipeline.evaluate(lambda replica, number: batch(0, replica, number)))
    for name, write in (("losses", lambda path: path.write_text(json.dumps(record))), ("parameters", lambda path: torch.save(pipeline.module.state_dict(), path))):
        path = Path(job.run_dir) / name / f"rank{RANK}.{'json' if name == 'losses' else 'pt'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)


if __name__ == "__main__":
    main()
