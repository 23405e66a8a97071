"""A small job in plain torch in which two processes hold each seat, each with a half of every linear layer.

RECYCLE_TEST_SEATS holds as JSON: ``folder``: of the job; ``steps``; ``stages``; ``kills``: [rank, step, where] of each
process that kills itself, ``where``: "between" steps, before that one, or in the "forward" or "backward" of a layer,
when the other one of its seat waits for it there; ``held``: the step before which members wait for a file ``go`` in the
folder; ``save``: the step after which a checkpoint is saved, or 0; ``load``: whether it begins with the one that was;
``clip``, ``split``: what is refused.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import endings
import torch
import torch.distributed as dist
from torch import nn

import recycle_plugin
from recycle_plugin.adapters.plain import Pipeline

WIDTH, HIDDEN = 8, 12
job = json.loads(os.environ["RECYCLE_TEST_SEATS"])
RANK, INCARNATION = int(os.environ["RANK"]), int(os.environ.get("RECYCLE_INCARNATION", "0"))
FOLDER = Path(job["folder"])


class Sum(torch.autograd.Function):
    """The sum over the seat forwards, or backwards."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, backwards: bool) -> torch.Tensor:
        ctx.backwards = backwards
        if not backwards:
            die("forward")
        return x if backwards else over_seat(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        if ctx.backwards:
            die("backward")
        return over_seat(gradient) if ctx.backwards else gradient, None


at_step = 0


def die(where: str) -> None:
    if [RANK, at_step, where] in job["kills"] and not INCARNATION:
        os.kill(os.getpid(), signal.SIGKILL)


def over_seat(x: torch.Tensor) -> torch.Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=recycle_plugin.seat_group())
    return total


class Halves(nn.Module):
    """Two linear layers, the first cut by its outputs and the second by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        wide, narrow = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        group = recycle_plugin.seat_group()
        part, parts = dist.get_rank(group), dist.get_world_size(group)
        self.wide = nn.Parameter(wide.weight.detach().chunk(parts, 0)[part].clone())
        self.narrow = nn.Parameter(narrow.weight.detach().chunk(parts, 1)[part].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(nn.functional.linear(Sum.apply(x, True), self.wide))
        return x + Sum.apply(nn.functional.linear(inner, self.narrow), False)


def batch(step: int, replica: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000_000 * step + 1_000 * replica + micro_batch)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def main() -> None:
    pipeline = Pipeline(
        [Halves] * (2 * job["stages"]),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        batch,
        job["stages"],
        2,
        shards=2,
        clip=job["clip"],
        settings={"run_dir": job["folder"], "report": False, "check_replicas": 1}
        | ({"split_backward": True} if job["split"] else {}),
    )
    if job["load"]:
        pipeline.load(FOLDER.parent / "saved")
    losses = []
    while pipeline.steps < job["steps"]:
        global at_step
        at_step = step = pipeline.steps + 1
        die("between")
        if step == job["held"] and not pipeline.behind:
            endings.wait_for(FOLDER / "go")
        losses.append(pipeline.step())
        if step == job["save"]:
            pipeline.save(FOLDER.parent / "saved")
    weights = {name: value.detach().flatten().tolist() for name, value in pipeline.module.named_parameters()}
    endings.leave(FOLDER, {"losses": losses, "weights": weights, "incarnation": INCARNATION})


if __name__ == "__main__":
    main()
