"""A script that runs forward and backward itself, and the same training in one process: each rank writes both losses,
and by how much its weights differ.

Overrides as in plain.py; ``wrong``: what is refused; ``kept=true``: gradients are made in memory that the script keeps;
``sums=true``: the script counts the ranks behind each step.
"""

from __future__ import annotations

import os
import sys

import endings
import torch
from omegaconf import OmegaConf
from torch import nn
from wrappers import inside

from recycle_plugin.adapters.plain import Replicas

WIDTH, STEPS = 8, 6
job = OmegaConf.merge(
    {"gradient_clipping": 0.0, "wrong": "", "kept": False, "sums": False, "recycle": {}},
    OmegaConf.from_dotlist(sys.argv[1:]),
)
replicas, micro_batches = job.topology.replicas, job.topology.micro_batches
computed = []


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.5).eval(), nn.Linear(WIDTH, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def loss_of(model: nn.Module, step: int, replica: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((step * 100 + replica) * 100 + micro_batch)
    inputs, labels = torch.randn(3, WIDTH, generator=generator), torch.randn(3, 2, generator=generator)
    return nn.functional.mse_loss(model(inputs), labels)


def compute(step: int, replica: int, micro_batch: int) -> torch.Tensor:
    """What a loop of the script's own would do."""
    if job.wrong == "iterator":
        replica = len(computed)
    loss = loss_of(model, step, replica, micro_batch)
    if job.kept:
        for parameter, gradient, memory in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), kept, strict=True
        ):
            parameter.grad = memory.copy_(gradient)
    elif job.wrong != "backward":
        loss.backward()
    if job.wrong == "step":
        optimizer.step()
    computed.append([step, replica, micro_batch])
    return torch.ones(2) if job.wrong == "loss" else loss


def alone() -> tuple[list[float], nn.Module]:
    other, optimizer, scheduler = make(0)
    losses = []
    for step in range(1, STEPS + 1):
        total = sum(
            loss_of(other, step, replica, number) for replica in range(replicas) for number in range(micro_batches)
        ) / (replicas * micro_batches)
        optimizer.zero_grad()
        total.backward()
        if job.gradient_clipping:
            nn.utils.clip_grad_norm_(other.parameters(), job.gradient_clipping)
        optimizer.step()
        scheduler.step()
        losses.append(total.item())
    return losses, other


model, optimizer, scheduler = make(int(os.environ["RANK"]))  # which the first worker's takes the place of
kept = [torch.empty_like(parameter) for parameter in model.parameters()]
if job.wrong == "optimizer":
    optimizer.add_param_group({"params": nn.Linear(3, 5).parameters()})
if job.wrong == "closure":
    optimizer = torch.optim.LBFGS(model.parameters())
if job.wrong == "statistics":
    model[0] = nn.utils.parametrizations.spectral_norm(model[0])
settings = OmegaConf.to_container(job.recycle) | {"run_dir": job.run_dir}
trained = Replicas(
    model, optimizer, compute, micro_batches, scheduler=scheduler, clip=job.gradient_clipping, settings=settings
)
if job.wrong == "second":
    Replicas(*make(1)[:2], compute)
losses, sums = [], []
for _ in range(STEPS):
    losses.append(trained.step())
    if job.sums:
        torch.distributed.all_reduce(count := torch.ones(()))
        sums.append(count.item())
expected, other = alone()
differ = max(
    (mine - theirs).abs().max().item() for mine, theirs in zip(model.parameters(), other.parameters(), strict=True)
)
record = {
    "losses": losses,
    "alone": {"losses": expected},
    "weights_differ": differ,
    "computed": computed,
    "sums": sums,
    "undo_bytes": inside().stepping._undo.held_bytes,
}
endings.leave(job.run_dir, record)
