"""A pipeline in plain torch whose batch shrinks while a replica is out, and, for the test, the same layers in one
process, which is told which replicas each step has.

Overrides: ``topology.…``, ``recycle.…``, ``run_dir``.  RECYCLE_TEST_WRAP: as for gpt.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

WIDTH, STEPS, SEED, GAMMA = 8, 40, 3, 0.97
LAYERS: list[Callable[[], nn.Module]] = [
    partial(nn.Linear, WIDTH, WIDTH),
    nn.Tanh,
    partial(nn.LayerNorm, WIDTH),
    partial(nn.Linear, WIDTH, 2),
]
loss = nn.functional.mse_loss


def optimizer_of(parameters) -> torch.optim.Optimizer:
    """Steps by SGD go by the size of the sum, which Adam's don't."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ExponentialLR:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)


def batch(step: int, replica: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + micro_batch + 10 * replica + 100 * step)
    return torch.randn(1, WIDTH, generator=generator), torch.randn(1, 2, generator=generator)


def alone(replicas: int, micro_batches: int, ledger: Mapping[int, list[int]]) -> tuple[list[float], nn.Sequential]:
    """The losses and the model of a run in one process.  ``ledger``: of steps that lack some, the replicas that they
    have.
    """
    from recycle_plugin.runtime.devices.host import CPU
    from recycle_plugin.runtime.stage.randomness import keyed

    built = []
    for number, layer in enumerate(LAYERS):
        with keyed(SEED + number, CPU):
            built.append(layer())
    model = nn.Sequential(*built)
    optimizer = optimizer_of(model.parameters())
    scheduler, losses = scheduler_of(optimizer), []
    for step in range(1, STEPS + 1):
        have = ledger.get(step, range(replicas))
        each = [
            loss(model(inputs), labels)
            for replica in have
            for number in range(micro_batches)
            for inputs, labels in [batch(step, replica, number)]
        ]
        total = sum(each) / len(each)
        optimizer.zero_grad()
        total.backward()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate * (len(have) / replicas) ** 0.5
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        scheduler.step()
        losses.append(total.item())
    return losses, model


def main() -> None:
    import endings
    import wrappers
    from omegaconf import OmegaConf

    from recycle_plugin.adapters.plain import Pipeline

    job = OmegaConf.from_dotlist([text.lstrip("+") for text in sys.argv[1:]])
    wrappers.apply()
    pipeline = Pipeline(
        LAYERS,
        loss,
        optimizer_of,
        batch,
        job.topology.stages,
        job.topology.micro_batches,
        scheduler=scheduler_of,
        seed=SEED,
        settings=OmegaConf.to_container(job.recycle) | {"run_dir": job.run_dir},
    )
    record = {"losses": [], "rates": []}
    while pipeline.steps < STEPS:
        record["losses"].append(pipeline.step())
        record["rates"].append(pipeline.optimizer.param_groups[0]["lr"])
    endings.leave(job.run_dir, record, pipeline.module)


if __name__ == "__main__":
    main()
