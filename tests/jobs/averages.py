"""Averages what it sees after each step as four frameworks' training scripts do, and as recycle_plugin.mean does.

RECYCLE_TEST_AVERAGES holds as JSON: ``folder``; ``lost``, [rank, step]: that worker kills itself after that step, while
the others are about to average; ``settings`` of the plugin's.  RECYCLE_TEST_WRAP: as for gpt.py.  Each rank writes the
step's loss and each average to folder/losses/rank<r>.json.
"""

from __future__ import annotations

import json
import os
import signal

import deepspeed
import deepspeed_wrappers
import endings
import torch
import torch.distributed
import wrappers
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from samples import Samples

import recycle_plugin
from recycle_plugin.errors import RecycleError

STEPS, WIDTH = 5, 8
job = json.loads(os.environ["RECYCLE_TEST_AVERAGES"])


def megatron(losses: list[torch.Tensor], group) -> torch.Tensor:
    """As Megatron-LM, and Megatron-DeepSpeed after it, averages its losses over the data-parallel group."""
    averaged = torch.cat([loss.clone().detach().view(1) for loss in losses])
    torch.distributed.all_reduce(averaged, group=group)
    return averaged / torch.distributed.get_world_size(group=group)


def norm_over_pipeline(parameters, group) -> torch.Tensor:
    """As Megatron-DeepSpeed logs what its optimizer's state comes to: squares added up over the stages."""
    square = torch.stack([parameter.detach().norm() ** 2 for parameter in parameters]).sum()
    torch.distributed.all_reduce(square, group=group)
    return square**0.5


def neox(losses: list[torch.Tensor]) -> torch.Tensor:
    """As GPT-NeoX reduces its losses: over everybody."""
    reduced = torch.cat([loss.clone().detach().view(1) for loss in losses])
    torch.distributed.all_reduce(reduced)
    return reduced / torch.distributed.get_world_size()


def gathered(value: torch.Tensor, group=None) -> list[torch.Tensor]:
    """As torchmetrics brings everybody's state together: their sizes first, then the values, filled up to the
    largest.
    """
    group = group or torch.distributed.group.WORLD
    world = torch.distributed.get_world_size(group)
    torch.distributed.barrier(group=group)
    sizes = [torch.zeros(value.dim(), dtype=torch.long) for _ in range(world)]
    torch.distributed.all_gather(sizes, torch.tensor(value.shape, dtype=torch.long), group=group)
    most = torch.stack(sizes).max(dim=0).values
    filled = torch.nn.functional.pad(
        value,
        [side for here, there in zip(reversed(value.shape), reversed(most.tolist())) for side in (0, there - here)],
    )
    found = [torch.zeros_like(filled) for _ in range(world)]
    torch.distributed.all_gather(found, filled, group=group)
    return [each[tuple(slice(0, length) for length in size)] for each, size in zip(found, sizes)]


def seen(loss: torch.Tensor) -> dict[str, object]:
    replicas, pipeline = engine.mpu.get_data_parallel_group(), engine.mpu.get_pipe_parallel_group()
    both = [loss, 2 * loss]
    asked = {
        "neox": lambda: neox(both),
        "megatron": lambda: megatron(both, replicas),
        "norm": lambda: norm_over_pipeline(engine.module.parameters(), pipeline),
        "torchmetrics mean": lambda: torch.stack(gathered(loss.view(1))).mean(),
        "torchmetrics sum": lambda: torch.stack(gathered(torch.ones(1))).sum(),
        "average by torch": lambda: average(loss),
        "mean": lambda: recycle_plugin.mean(torch.stack(both)),
        "mean over replicas": lambda: recycle_plugin.mean(loss, replicas),
        "tokens": lambda: recycle_plugin.mean(torch.tensor([10.0 + engine.global_rank])),
        "over Gloo by name": lambda: recycle_plugin.mean(torch.tensor([10.0 + engine.global_rank]), by_name),
        "over a mesh": lambda: recycle_plugin.mean(torch.tensor([10.0 + engine.global_rank]), mesh.get_group("b")),
        "objects": lambda: objects(engine.global_rank),
    }
    return {name: tried(call) for name, call in asked.items()}


def objects(rank: int) -> torch.Tensor:
    found: list = [None] * torch.distributed.get_world_size(by_name)
    torch.distributed.all_gather_object(found, rank, group=by_name)
    return torch.tensor([-1 if each is None else each for each in found])


def average(loss: torch.Tensor) -> torch.Tensor:
    held = loss.clone()
    torch.distributed.all_reduce(held, torch.distributed.ReduceOp.AVG)
    return held


def tried(call) -> object:
    try:
        return call().tolist()
    except RecycleError as error:
        if "group_sums" in job["settings"]:
            raise
        return str(error)


wrappers.apply(deepspeed_wrappers)
deepspeed.init_distributed()
by_name = torch.distributed.new_group(backend="gloo")  # as Megatron-LM makes them
mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"b": "gloo"})
torch.manual_seed(7)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "recycle": {"enabled": True, "run_dir": job["folder"], "report": False} | job["settings"],
}
layers = [LayerSpec(torch.nn.Linear, WIDTH, WIDTH), LayerSpec(torch.nn.Tanh), LayerSpec(torch.nn.Linear, WIDTH, WIDTH)]
model = PipelineModule(
    layers,
    topology=PipeDataParallelTopology(2, 2),
    loss_fn=torch.nn.functional.mse_loss,
    partition_method="uniform",
    seed_layers=True,
)
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config, training_data=Samples(WIDTH)
)
record = {"losses": [], "seen": []}
for step in range(1, STEPS + 1):
    loss = engine.train_batch()
    engine.settle()  # so that who dies now leaves nothing of the step to be done
    if [engine.global_rank, step] == job["lost"]:
        os.kill(os.getpid(), signal.SIGKILL)
    record["losses"].append(loss.item())
    record["seen"].append(seen(loss))
engine.eval_batch(iter([Samples(WIDTH)[0]] * 2))
engine.save_checkpoint(job["folder"] + "/saved")
engine.load_checkpoint(job["folder"] + "/saved")
engine.train_batch()
endings.leave(job["folder"], record)
