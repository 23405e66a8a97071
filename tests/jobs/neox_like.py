"""Calls the engine as GPT-NeoX's training does: three stages, loaders on the ends only and flags broadcast over each
pipeline, parameter groups, a batch function of the model's, the same iterator for a step of evaluation in between.
RECYCLE_TEST_SCRIPT: as megatron_like.py's.
"""

from __future__ import annotations

import json
import math
import os

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from scripts_models import VOCABULARY, Block, Embed, Head, Tokens, masked_loss, save

LENGTH, BATCH, REPLICAS, STAGES = 8, 2, 2, 3
job = json.loads(os.environ["RECYCLE_TEST_SCRIPT"])


class Pipe(PipelineModule):
    def batch_fn(self, data):
        """None stays None: a stage between the ends has nothing to read."""
        if data is None:
            return None
        text = data["text"]
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        mask = torch.triu(torch.ones(1, 1, tokens.size(1), tokens.size(1), dtype=torch.bool), 1)
        positions = torch.arange(tokens.size(1)).expand_as(tokens)
        return (tokens, positions, mask), (labels, torch.ones_like(labels, dtype=torch.float))


def groups(module: torch.nn.Module) -> list[dict]:
    decayed = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
    return [
        group
        for group in ({"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0})
        if group["params"]
    ]


class Distributed(torch.utils.data.Sampler):
    """Every ``replicas``-th batch is this replica's."""

    def __init__(self, length: int, replica: int) -> None:
        self.batches = [
            list(range(first, first + BATCH)) for first in range(replica * BATCH, length - BATCH + 1, REPLICAS * BATCH)
        ]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def build_iterator(engine):
    ends = engine.grid.get_pipe_parallel_rank() in (0, STAGES - 1)
    data = Tokens(4000, LENGTH + 1, VOCABULARY)
    loader = (
        torch.utils.data.DataLoader(data, batch_sampler=Distributed(len(data), engine.grid.get_data_parallel_id()))
        if ends
        else None
    )
    flags = torch.tensor([int(loader is not None)])
    torch.distributed.all_reduce(flags, group=engine.grid.get_pipe_parallel_group())
    assert flags.item() == 2
    return iter(loader) if ends else None


deepspeed.init_distributed()
torch.manual_seed(1234)
model = Pipe(
    [LayerSpec(Embed, LENGTH), *[LayerSpec(Block) for _ in range(3)], LayerSpec(Head)],
    loss_fn=masked_loss,
    topology=PipeDataParallelTopology(STAGES, REPLICAS),
    partition_method="parameters",
)
optimizer = torch.optim.AdamW(groups(model), lr=5e-3, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / job["steps"])))
)
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
    "recycle": {"enabled": True, "run_dir": job["folder"], "faults": job["faults"]},
}
engine, optimizer, _, scheduler = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    lr_scheduler=scheduler,
    dist_init_required=False,
    model_parameters=None,
    config=config,
)
engine.total_params = sum(parameter.numel() for parameter in engine.module.parameters())
engine.set_has_attention_mask(True)
engine.set_batch_fn(engine.module.batch_fn)
iterator = build_iterator(engine)
losses = []
for iteration in range(job["steps"]):
    losses.append(engine.train_batch(data_iter=iterator).item())
    if iteration == 1:
        engine.eval_batch(iterator)
        torch.distributed.barrier()
save(
    job["folder"],
    engine,
    {
        "losses": losses,
        "rates": [group["lr"] for group in optimizer.param_groups],
        "steps": engine.global_steps,
        "samples": engine.global_samples,
    },
)
