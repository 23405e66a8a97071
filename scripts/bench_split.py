#!/usr/bin/env python
"""The cost of splitting the backward: processor time and memory of one process, against the fused backward.

``graph`` is the split of torch.distributed.pipelining.  The splits take turns; medians. ``host``: layers so small that
only the host's time counts. To measure another commit, set PYTHONPATH to its checkout.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from recycle_plugin.runtime.stage.split_backward import DeferredWeights

HIDDEN, SEQUENCE, BATCH, LAYERS = 512, 256, 4, 4


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def blocks(wrap: Callable[[nn.Module], nn.Module] = lambda inner: inner) -> nn.Sequential:
    return nn.Sequential(*(wrap(Block()) for _ in range(LAYERS)))


def megatron() -> nn.Module:
    import torch.distributed as dist

    from recycle_plugin.lab.training.gpt import GPTShape, gpt_layers

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shape = GPTShape(layers=LAYERS, hidden=HIDDEN, heads=8, sequence=SEQUENCE, vocabulary=64, dropout=0.0)
    return nn.Sequential(*(spec.build() for spec in gpt_layers(shape)[1:-1]))


def vectors(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=dtype).requires_grad_()


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
CASES: dict[str, Case] = {
    "host": (
        lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(48))),
        lambda: torch.randn(8, 32).requires_grad_(),
    ),
    "fp32": (blocks, vectors),
    "bf16": (lambda: blocks().bfloat16(), partial(vectors, torch.bfloat16)),
    "checkpoints": (lambda: blocks(lambda inner: Checkpointed(inner, False)), vectors),
    "reentrant checkpoints": (lambda: blocks(lambda inner: Checkpointed(inner, True)), vectors),
    "first stage": (
        lambda: nn.Sequential(nn.Embedding(8192, HIDDEN), *blocks()),
        lambda: torch.randint(8192, (BATCH, SEQUENCE)),
    ),
    "megatron-core": (megatron, lambda: torch.randn(SEQUENCE, BATCH, HIDDEN).requires_grad_()),
}


def resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def once(way: str, model: nn.Module, deferred: DeferredWeights, x: Tensor, weigh: bool) -> list[float]:
    """Return seconds of F, I and W, and bytes held between I and W."""
    before = resident() if weigh else 0
    times = [time.process_time()]
    if way == "split":
        with deferred.forward():
            output = model(x)
    else:
        output = model(x)
    gradient = torch.ones_like(output)
    times.append(time.process_time())
    if way == "fused":
        output.backward(gradient)
        left: Callable[[], object] = int
    elif way == "split":
        with deferred.hold() as pending:
            output.backward(gradient)
        left = pending.run
    else:
        parameters = list(model.parameters())
        _, groups = stage_backward_input([output], [gradient], [x], iter(parameters))
        left = partial(stage_backward_weight, iter(parameters), groups)
    times.append(time.process_time())
    del output, gradient
    held = resident() - before if weigh else 0
    times.append(time.process_time())
    left()
    times.append(time.process_time())
    return [times[1] - times[0], times[2] - times[1], times[4] - times[3], float(held)]


def measured(name: str, repeat: int) -> None:
    torch.manual_seed(0)
    make, inputs = CASES[name]
    model = make()
    deferred, rows = DeferredWeights(model), {way: [] for way in ("fused", "split", "graph")}
    missing: dict[str, str] = {}
    for number in range(repeat + 3):
        x = inputs()
        for way in [way for way in rows if way not in missing]:
            model.zero_grad()
            given = x.detach().clone().requires_grad_(x.requires_grad)
            try:
                rows[way].append(once(way, model, deferred, given, number == 2))
            except Exception as error:
                missing[way] = f"{type(error).__name__}: {str(error)[:60]}"
                continue
            if all(parameter.grad is None for parameter in model.parameters()):
                missing[way] = "no parameter has a gradient"
    fused = sum(median(column) for column in list(zip(*rows["fused"][3:]))[:3])
    for way, made in rows.items():
        if way in missing:
            print(f"{name:22} {way:6} {missing[way]}")
            continue
        forward, inner, weight = (1e3 * median(column) for column in list(zip(*made[3:]))[:3])
        each = (forward + inner + weight) / 1e3 / fused
        line = f"F {forward:7.2f} I {inner:7.2f} W {weight:7.2f} ms, {each:.2f} x fused"
        print(f"{name:22} {way:6} {line}, held {made[2][3] / 2**20:.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[*CASES], help=f"of {', '.join(CASES)}")
    parser.add_argument("--repeat", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.cases:
        measured(name, given.repeat * (10 if name == "host" else 1))


if __name__ == "__main__":
    main()
