"""A model with collectives wherever one can be written, each of which is refused: what it says is kept, and training
goes on without.

RECYCLE_TEST_COLLECTIVES holds as JSON: ``folder``; ``uncaught``, the step in which a layer lets the refusal through, or
null. Each rank writes what was said, by place, to folder/losses/rank<r>.json.
"""

from __future__ import annotations

import json
import os

import deepspeed
import endings
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch.utils.checkpoint import checkpoint

import recycle_plugin
from recycle_plugin.errors import RecycleError

STEPS, WIDTH = 3, 8
job = json.loads(os.environ["RECYCLE_TEST_COLLECTIVES"])
said: dict[str, list[str]] = {}
groups: dict[str, object] = {}


def tried(place: str, call) -> None:
    try:
        call()
    except RecycleError as error:
        said.setdefault(place, []).append(str(error))
    else:
        said.setdefault(place, []).append("went")


class Reducing(torch.autograd.Function):
    """Whose backward asks the other replicas."""

    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        tried("backward", lambda: dist.all_reduce(gradient.clone(), group=groups["replicas"]))
        return gradient * 2


class Asks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.first.weight.register_hook(
            lambda gradient: tried("hook", lambda: dist.all_reduce(gradient.clone(), group=groups["replicas"]))
        )

    def forward(self, value):
        own, replicas, rank = value.detach().clone(), groups["replicas"], dist.get_rank()
        other = next(one for one in dist.get_process_group_ranks(replicas) if one != rank)
        if not self.training:
            tried("evaluation", lambda: dist.all_reduce(own, group=replicas))
        elif engine.global_steps + 1 == job["uncaught"]:
            dist.all_reduce(own, group=replicas)
        else:
            tried("forward", lambda: dist.all_reduce(own, group=replicas))
            tried("later", lambda: dist.all_reduce(own, async_op=True))
            tried("mean", lambda: recycle_plugin.mean(own, replicas))
            tried("barrier", lambda: dist.barrier(replicas))
            tried("send", lambda: dist.isend(own, other))
            tried("receive", lambda: dist.recv(own, other))
            tried("gather", lambda: dist.all_gather_object([None] * 2, rank, group=replicas))
            tried("alone", lambda: dist.all_reduce(own, group=groups["alone"]))
        return Reducing.apply(
            checkpoint(self.inner, checkpoint(self.outer, self.first(value), use_reentrant=True), use_reentrant=False)
        )

    def outer(self, value):
        tried("recomputed", lambda: dist.all_reduce(value.detach().clone()))
        return torch.tanh(value)

    def inner(self, value):
        tried("recomputed otherwise", lambda: dist.all_reduce(value.detach().clone()))
        return self.second(value)


def loss_function(outputs, labels):
    tried("loss", lambda: dist.all_reduce(outputs.detach().sum(), group=groups["replicas"]))
    return torch.nn.functional.mse_loss(outputs, labels)


def source(step: int, replica: int, micro_batch: int):
    tried("data", dist.barrier)
    return batch(100 * step + 10 * replica + micro_batch)


def batch(seed: int):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(2, WIDTH, generator=made), torch.randn(2, WIDTH, generator=made)


deepspeed.init_distributed()
torch.manual_seed(7)
groups["alone"] = [dist.new_group([rank], backend="gloo") for rank in range(4)][dist.get_rank()]
groups["gloo"] = dist.new_group(backend="gloo")
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "recycle": {"enabled": True, "run_dir": job["folder"], "report": False},
}
model = PipelineModule(
    [LayerSpec(Asks), LayerSpec(Asks)],
    topology=PipeDataParallelTopology(2, 2),
    loss_fn=loss_function,
    partition_method="uniform",
)
engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
groups["replicas"] = engine.mpu.get_data_parallel_group()
optimizer.register_step_pre_hook(lambda *_: tried("optimizer", dist.barrier))
engine.set_data_source(source)
losses = []
for step in range(1, STEPS + 1):
    if step == 2:
        engine.eval_batch(iter([batch(0)] * 2))
        tried("between steps", lambda: dist.all_reduce(torch.ones(1)))
        tried("a group of Gloo's by name", lambda: dist.all_reduce(torch.ones(1), group=groups["gloo"]))
    if step == job["uncaught"]:
        engine.settle()
        dist.barrier()
    endings.leave(job["folder"], {"said": said, "backend": dist.get_backend(groups["gloo"])})
    losses.append(engine.train_batch().item())
