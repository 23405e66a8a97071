"""A small GPT trains on the device as on the CPU, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

D = "standin"
WORDS, WIDTH = 11, 16


class Block(nn.Module):
    """Attention and an MLP, with dropout."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x):
        if self.recompute == "no":
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=self.recompute == "reentrant")

    def run(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def net(recompute: str = "no") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(recompute), Block(recompute), nn.Linear(WIDTH, WORDS))


def train(model, device, optimizer, *, dtype=torch.float32, autocast=None, steps=3):
    """The losses and the parameters at the end, on the host."""
    model = copy.deepcopy(model).to(device, dtype)
    optimizer = optimizer(model.parameters())
    inputs, labels = (torch.arange(20).remainder(WORDS).roll(by).view(4, 5).to(device) for by in (0, 1))
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


OPTIMIZERS = {
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=True),
}
CASES = {
    **{name: {"optimizer": name} for name in OPTIMIZERS},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16, "optimizer": "sgd"},
    "recomputed": {"recompute": "yes"},
    "recomputed reentrantly": {"recompute": "reentrant"},
}


@pytest.mark.parametrize("case", CASES)
def test_as_on_the_cpu(standin, case):
    settings = {"optimizer": "adamw foreach", "recompute": "no", **CASES[case]}
    model, optimizer = net(settings.pop("recompute")), OPTIMIZERS[settings.pop("optimizer")]
    expected, found = train(model, "cpu", optimizer, **settings), train(model, D, optimizer, **settings)
    assert found[0] == expected[0] and len(set(found[0])) == 3
    assert all(map(torch.equal, found[1], expected[1]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_casts_what_cuda_casts(standin, dtype):
    dtype = getattr(torch, dtype)
    losses = train(net(), D, OPTIMIZERS["adamw foreach"], autocast=dtype)[0]
    plain = train(net(), D, OPTIMIZERS["adamw foreach"])[0]
    assert losses != plain and losses == pytest.approx(plain, rel=2e-2)
    with torch.autocast(D, dtype):
        linear, a = nn.Linear(3, 3).to(D), torch.ones(3, 3, device=D)
        assert linear(a).dtype == dtype and F.layer_norm(linear(a), (3,)).dtype == torch.float32
        assert torch.cat([a, linear(a)]).dtype == torch.float32


def test_loss_scaling(standin):
    model = nn.Linear(2, 1).to(D)
    scaler, optimizer = torch.amp.GradScaler(D, init_scale=4.0), torch.optim.SGD(model.parameters(), 1.0)
    before = [parameter.clone() for parameter in model.parameters()]
    scaler.scale((model(torch.ones(1, 2, device=D)) * float("inf")).sum()).backward()
    scaler.step(optimizer), scaler.update()
    assert all(map(torch.equal, before, model.parameters())) and scaler.get_scale() == 2.0
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2, device=D)).sum()).backward()
    scaler.step(optimizer), scaler.update()
    assert torch.equal(model.bias, before[1] - 1)


def test_backward_on_side_streams_is_ordered_by_autograd(standin):
    side, ours = torch.Stream(device=D), torch.accelerator.current_stream()
    a = torch.ones(3, device=D, requires_grad=True)
    side.wait_stream(ours)
    with side:
        b = a * 2
    ours.wait_stream(side)
    b.record_stream(ours)
    (b * 3).sum().backward()
    assert a.grad.tolist() == [6, 6, 6]
