"""A small job whose replicas of two processes each share a model by torch's fully_shard, and the same training in one
process: each rank writes both losses, by how much its shards differ from that one's weights, what its evaluations gave,
and how often it has read weights that were no step's.

RECYCLE_TEST_HSDP holds as JSON: ``folder``: of the job; ``steps``; ``settings``: the plugin's; ``held``: the step
before which members wait for a file ``go`` in the folder, or 0; ``clip``; ``half``: FSDP's mixed precision in bf16;
``dropout``; ``evaluate``: after each so many steps, 0 for never; ``shards``: processes of a replica, 1 for none;
``save``: [after which step, where]; ``full``: the rank whose disk is full at first then, or null; ``load``: where from,
to save it again at once; ``lone``: the step from which on only replica 0 contributes, or 0; ``wrong``: what is refused.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import endings
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

from recycle_plugin.adapters.plain import Replicas, replica_mesh
from recycle_plugin.errors import NotSaved

job = json.loads(os.environ["RECYCLE_TEST_HSDP"])
WIDTH, SHARDS, MICRO_BATCHES = 8, job["shards"], 2
FOLDER, INCARNATION = Path(job["folder"]), int(os.environ.get("RECYCLE_INCARNATION", "0"))
REPLICAS = int(os.environ["WORLD_SIZE"]) // SHARDS


def make() -> nn.Sequential:
    """Sizes that two processes can't halve, and a weight that only the first of them has."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 13), nn.Tanh(), nn.Dropout(job["dropout"]), nn.Linear(13, 6), nn.LayerNorm(6)]
    return nn.Sequential(*layers, nn.Linear(6, 1))


def shard(model: nn.Module) -> int:
    """As torchtitan does: each layer, then the rest; which part of each micro-batch this process computes."""
    if SHARDS == 1:
        return 0
    mesh = init_device_mesh("cpu", (REPLICAS * SHARDS,)) if job["wrong"] == "mesh" else replica_mesh(SHARDS)
    if job["wrong"] == "unused":
        return 0
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if job["half"] else {}
    if job["wrong"] == "compiled":
        model[0] = torch.compile(model[0], backend="eager")
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh, **how)
    if job["wrong"] != "rest":
        fully_shard(model, mesh=mesh, **how)
    return mesh.get_local_rank()


def batch(step: int, replica: int, micro_batch: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(((step * 100 + replica) * 100 + micro_batch) * 10 + part)
    inputs = torch.randn(4, WIDTH, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True)


model, other = make(), make()
part = shard(model)
weights = dict(model.named_parameters())  # a forward that no backward follows leaves gathered ones in the layers
kind = {"optimizer": getattr(torch.optim, "Adafactor", None)}.get(job["wrong"], torch.optim.Adam)
optimizer = kind(model.parameters(), lr=1e-2)


mask = []  # of this process's, in the first micro-batch


def compute(step: int, replica: int, micro_batch: int) -> torch.Tensor:
    """What a loop of the script's own would do."""
    inputs, labels = batch(step, replica, micro_batch, part)
    if job["dropout"] and [step, replica, micro_batch] == [1, 0, 0]:
        mask[:] = nn.functional.dropout(torch.ones(64)).tolist()
    loss = nn.functional.mse_loss(model(inputs), labels)
    loss.backward()
    return loss


@torch.no_grad()
def evaluation(module: nn.Module) -> float:
    """Of data of this process's own, in the middle of training."""
    module.eval()
    inputs, labels = batch(0, 0, 0, part)
    loss = nn.functional.mse_loss(module(inputs), labels).item()
    module.train()
    return loss


def alone(steps: int) -> tuple[list[float], dict[int, float]]:
    stepper = torch.optim.Adam(other.parameters(), lr=1e-2)
    losses, evaluations = [], {}
    for step in range(1, steps + 1):
        lone = 0 < job["lone"] <= step
        stepper.param_groups[0]["lr"] = 1e-2 * (0.5**0.5 if lone else 1)
        places = [
            (r, m, p) for r in range(1 if lone else REPLICAS) for m in range(MICRO_BATCHES) for p in range(SHARDS)
        ]
        total = torch.zeros(())
        for place in places:
            inputs, labels = batch(step, *place)
            total = total + nn.functional.mse_loss(other(inputs), labels) / len(places)
        stepper.zero_grad()
        total.backward()
        if job["clip"]:
            nn.utils.clip_grad_norm_(other.parameters(), job["clip"])
        stepper.step()
        losses.append(total.item())
        if job["evaluate"] and step % job["evaluate"] == 0:
            evaluations[step] = evaluation(other)
    return losses, evaluations


def save_without_room(replicas: Replicas, folder: str) -> str:
    """Save where the system lets one rank write no large file; returns what the script is told."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if int(os.environ["RANK"]) == job["full"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        replicas.save(folder)
    except NotSaved as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


def main() -> None:
    replicas = Replicas(model, optimizer, compute, MICRO_BATCHES, clip=job["clip"], dcp=True, settings=job["settings"])
    if job["load"]:
        replicas.load(job["load"])
        if job["save"]:
            replicas.save(job["save"][1])
    losses, evaluations, torn, refused = [], {}, 0, ""
    while replicas.steps < job["steps"]:
        if replicas.steps + 1 == job["held"] and not replicas.behind:
            endings.wait_for(FOLDER / "go")
        if job["wrong"] == "freeze" and replicas.steps == 2:
            model[0].bias.requires_grad_(False)
        if job["wrong"] == "assign" and replicas.steps == 2:
            model.load_state_dict(model.state_dict(), assign=True)
        losses.append(replicas.step())
        if job["clip"]:  # which may take a step back once it is applied
            read = weights["0.weight"] + 0
            replicas.settle()
            torn += not torch.equal(*(getattr(each, "_local_tensor", each) for each in (read, weights["0.weight"])))
        if job["save"] and replicas.steps == job["save"][0]:
            if job["full"] is not None:
                refused = save_without_room(replicas, job["save"][1])
            replicas.save(job["save"][1])
        if job["evaluate"] and replicas.steps % job["evaluate"] == 0 and not replicas.behind:
            evaluations[replicas.steps] = evaluation(model)
    replicas.settle()
    expected = dict(other.named_parameters())
    theirs, evaluated = alone(replicas.steps)
    differ = 0.0
    for name, weight in weights.items():
        mine = weight.to_local() if isinstance(weight, DTensor) else weight.detach()
        chunks = expected[name].detach().chunk(SHARDS)
        rows = chunks[part] if part < len(chunks) else expected[name].detach()[:0]
        assert mine.shape == rows.shape, name
        differ = max([differ, *(mine - rows).abs().flatten().tolist()])
    record = {
        "losses": losses,
        "alone": theirs,
        "weights_differ": differ,
        "torn": torn,
        "refused": refused,
        "mask": mask,
        "incarnation": INCARNATION,
    }
    record |= {"digest": replicas._trainer.state.digest(), "shard": part}
    endings.leave(FOLDER, record | {"evaluations": evaluations, "evaluated": evaluated})


if __name__ == "__main__":
    main()
