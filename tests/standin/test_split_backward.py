"""The split backward on a device: stock backward's gradients bit for bit, in the order of the stream that computes."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from recycle_plugin.runtime.stage.split_backward import DeferredWeights

WIDTH, STEPS = 16, 3


class Block(nn.Module):
    """Of all kinds of layers whose backward is split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.dropout(nn.functional.gelu(self.wide(self.norm(x))), 0.1))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def megatron() -> nn.Module:
    """megatron-core's own layer, in its local implementation."""
    from recycle_plugin.lab.training.gpt import GPTShape, gpt_layers

    os.environ.pop("DS_ACCELERATOR", None)  # of this process, which is the test's own
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return gpt_layers(GPTShape(layers=1, hidden=WIDTH, heads=2, sequence=8, vocabulary=64, dropout=0.1))[1].build()


MODELS = {
    "layers": lambda: nn.Sequential(Block(), Block()),
    "reentrant checkpoints": lambda: nn.Sequential(Checkpointed(Block(), True), Block()),
    "checkpoints": lambda: nn.Sequential(Checkpointed(Block(), False), Block()),
    "megatron-core": megatron,
}
OPTIMIZERS = {
    "Adam, foreach": lambda parameters: torch.optim.Adam(parameters, 1e-2, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "SGD, foreach": lambda parameters: torch.optim.SGD(parameters, 1e-2, 0.9, foreach=True),
}


def trained(model: nn.Module, make, split: bool, where: str) -> list[torch.Tensor]:
    """Gradients of inputs and parameters of some steps of two micro-batches, and the parameters after them."""
    torch.manual_seed(5)
    model = copy.deepcopy(model).to(where)
    optimizer, made = make(model.parameters()), []
    deferred = DeferredWeights(model) if split else None
    for _ in range(STEPS):
        work = []
        for _ in range(2):
            x = torch.randn(8, 2, WIDTH).to(where).requires_grad_()
            if deferred is None:
                (model(x) ** 2).sum().backward()
            else:
                with deferred.forward():
                    loss = (model(x) ** 2).sum()
                with deferred.hold() as pending:
                    loss.backward()
                work.append(pending)
            made.append(x.grad)
        for pending in work:
            pending.run()
        made += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [each.cpu() for each in (*made, *model.parameters())]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_it_is_stock_backward_bit_for_bit(standin, model, optimizer):
    made, make = MODELS[model](), OPTIMIZERS[optimizer]
    fused, split = (trained(made, make, each, standin.NAME) for each in (False, True))
    assert len(fused) == len(split) and all(map(torch.equal, fused, split))
    assert all(each.isfinite().all() for each in fused)


def test_without_random_numbers_it_is_the_hosts_too(standin):
    model, make = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)), OPTIMIZERS["Adam, foreach"]
    there, here = (trained(model, make, True, where) for where in (standin.NAME, "cpu"))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(there, here, strict=True))
