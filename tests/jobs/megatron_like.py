"""Calls the engine as Megatron-DeepSpeed's pretraining does: own optimizer and scheduler, a tied embedding, a batch
function, cyclic iterators on the first and last stage and None between them, and questions to the engine after each
step.  RECYCLE_TEST_SCRIPT: {"folder", "faults", "steps"}, and maybe more of DeepSpeed's {"config"} and of the plugin's
{"settings"}.
"""

from __future__ import annotations

import json
import os
from functools import partial
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from scripts_models import VOCABULARY, Block, Embed, Tokens, logits, masked_loss, save

job = json.loads(os.environ["RECYCLE_TEST_SCRIPT"])
args = SimpleNamespace(
    deepspeed=True,
    iteration=0,
    consumed_train_samples=0,
    micro_batch_size=2,
    global_batch_size=8,
    train_iters=job["steps"],
    seq_length=8,
    curr_iteration=0,
)


class SequentialSampler:
    """Megatron's: global batches of micro-batch size × data parallel size, of which each rank takes its slice, from
    where training stands.
    """

    def __init__(self, total: int, consumed: int, size: int, rank: int, ranks: int) -> None:
        self.total, self.consumed, self.size, self.rank, self.ranks = total, consumed, size, rank, ranks

    def __len__(self) -> int:
        return self.total

    def __iter__(self):
        together = self.size * self.ranks
        for start in range(self.consumed, self.total - together + 1, together):
            yield list(range(start + self.rank * self.size, start + (self.rank + 1) * self.size))


def cyclic(loader):
    while True:
        yield from loader


def get_batch_pipe(data):
    """From the loader's dictionary to ((tokens, positions, mask), (labels, loss mask))."""
    text = data["text"].long()
    labels, tokens = text[:, 1:].contiguous(), text[:, :-1].contiguous()
    mask = torch.tril(torch.ones(1, 1, tokens.size(1), tokens.size(1))) < 0.5
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    return (tokens, positions, mask), (labels, (labels % 5 != 0).float())


class Annealing:
    """A scheduler of the script's own, as Megatron's: one step per iteration, with a state."""

    def __init__(self, optimizer: torch.optim.Optimizer, most: float, warm: int) -> None:
        self.optimizer, self.most, self.warm, self.num_steps = optimizer, most, warm, 0
        self.step(0)

    def step(self, increment: int = 1) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.most * min(1.0, (self.num_steps + 1) / self.warm)

    def state_dict(self) -> dict:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict) -> None:
        self.num_steps = state["num_steps"]
        self.step(0)


def setup():
    torch.manual_seed(1234)
    embed = partial(TiedLayerSpec, "embed", Embed, args.seq_length, tied_weight_attr="word_embeddings_weight")
    model = PipelineModule(
        [embed(), LayerSpec(Block), LayerSpec(Block), embed(forward_fn=logits)],
        loss_fn=masked_loss,
        topology=PipeDataParallelTopology(2, 2),
        partition_method="type:Embed|Block",
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "train_batch_size": args.global_batch_size,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        **job.get("config", {}),
        "recycle": {"enabled": True, "run_dir": job["folder"], "faults": job["faults"]} | job.get("settings", {}),
    }
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, lr_scheduler=Annealing(optimizer, 1e-2, 4), config=config
    )
    engine.set_batch_fn(get_batch_pipe)
    return [engine], optimizer, scheduler


def train_data_iterator(engine):
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    data = Tokens(400, args.seq_length + 1, VOCABULARY)
    sampler = SequentialSampler(
        len(data), args.consumed_train_samples, args.micro_batch_size, engine.grid.get_data_parallel_rank(), 2
    )
    return iter(cyclic(torch.utils.data.DataLoader(data, batch_sampler=sampler)))


def train_step(data_iterator, model):
    loss = model[0].train_batch(data_iter=data_iterator)
    skipped = 0 if model[0].was_step_applied() else 1
    return {"lm loss": loss}, skipped, model[0].get_global_grad_norm(), 0


deepspeed.init_distributed()
model, optimizer, scheduler = setup()
iterator = train_data_iterator(model[0])
losses, rates = [], []
while args.iteration < args.train_iters:
    loss_dict, skipped, grad_norm, _ = train_step(iterator, model)
    assert not skipped
    args.iteration += 1
    args.consumed_train_samples += args.global_batch_size
    losses.append(loss_dict["lm loss"].item())
    rates.append(optimizer.param_groups[0]["lr"])
save(
    job["folder"],
    model[0],
    {"losses": losses, "rates": rates, "steps": model[0].global_steps, "samples": model[0].global_samples},
)
