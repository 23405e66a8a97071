"""A pipeline in plain torch, and the same layers in one process: each rank writes both losses, and by how much its
stage's weights differ.

Overrides as in plain.py, and ``dataset=true``: the data is a map-style dataset.
"""

from __future__ import annotations

import sys

import endings
import torch
from omegaconf import OmegaConf
from torch import nn

from recycle_plugin.adapters.plain import Pipeline
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.stage.randomness import keyed

WIDTH, STEPS, SEED = 8, 6, 3
job = OmegaConf.merge(
    {"optimizer": "adam", "gradient_clipping": 0.0, "schedule": False, "parts": None, "dataset": False, "recycle": {}},
    OmegaConf.from_dotlist(sys.argv[1:]),
)
replicas, stages, micro_batches = job.topology.replicas, job.topology.stages, job.topology.micro_batches
LAYERS = [
    lambda: nn.Linear(WIDTH, WIDTH),
    nn.Tanh,
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    lambda: nn.Linear(WIDTH, 2),
]
make_optimizer = {
    "adam": lambda given: torch.optim.Adam(given, lr=1e-2),
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
}[job.optimizer]
make_scheduler = (
    (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    if job.schedule
    else None
)
loss = nn.functional.mse_loss


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return replicas * micro_batches * STEPS

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(WIDTH, generator=generator), torch.randn(2, generator=generator)


def batch(step: int, replica: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the dataset, in whose order replica r has every so-many-th sample."""
    number = ((step - 1) * micro_batches + micro_batch) * replicas + replica
    return tuple(part[None] for part in Samples()[number])


def alone() -> tuple[list[float], list[nn.Module]]:
    built = []
    for number, layer in enumerate(LAYERS):
        with keyed(SEED + number, CPU):
            built.append(layer())
    model = nn.Sequential(*built)
    optimizer = make_optimizer(model.parameters())
    scheduler = make_scheduler and make_scheduler(optimizer)
    losses = []
    for step in range(1, STEPS + 1):
        each = [
            loss(model(inputs), labels)
            for replica in range(replicas)
            for number in range(micro_batches)
            for inputs, labels in [batch(step, replica, number)]
        ]
        total = sum(each) / len(each)
        optimizer.zero_grad()
        total.backward()
        if job.gradient_clipping:
            nn.utils.clip_grad_norm_(model.parameters(), job.gradient_clipping)
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(total.item())
    return losses, built


settings = OmegaConf.to_container(job.recycle) | {"run_dir": job.run_dir}
pipeline = Pipeline(
    LAYERS,
    loss,
    make_optimizer,
    Samples() if job.dataset else batch,
    stages,
    micro_batches,
    parts=job.parts,
    scheduler=make_scheduler,
    clip=job.gradient_clipping,
    seed=SEED,
    settings=settings,
)
begun = [parameter.detach().clone() for parameter in pipeline.module.parameters()]
losses = [pipeline.step() for _ in range(STEPS)]
expected, built = alone()
differ = changed = 0.0
for name, layer in pipeline.module.named_children():
    for mine, theirs in zip(layer.parameters(), built[int(name)].parameters(), strict=True):
        differ = max(differ, (mine - theirs).abs().max().item())
for mine, first in zip(pipeline.module.parameters(), begun, strict=True):
    changed = max(changed, (mine - first).abs().max().item())
record = {
    "losses": losses,
    "alone": {"losses": expected},
    "weights_differ": differ,
    "weights_changed": changed,
}
endings.leave(job.run_dir, record | {"deepspeed": "deepspeed" in sys.modules})
