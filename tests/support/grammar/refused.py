"""What the plugin can't do, and says so at the first step: pieces with what the line says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .pieces import WIDTH, WORDS, Note, Piece, ids, linear, quiet, rows, weights

REFUSED: dict[str, tuple[Callable[[Note], nn.Module], str]] = {}
FORWARD, BACKWARD, ELSE = (
    "is changed by each forward in training",
    "is changed by each backward in training",
    "a forward gives something else when it is run again",
)


def refused(name: str, line: str, compute: Callable[[Any, Tensor], Tensor], **makers: Callable[[], Any]) -> None:
    REFUSED[name] = (lambda note: Piece(compute, **{part: make() for part, make in makers.items()})), line


def counted(own: Any, hidden: Tensor) -> Tensor:
    own.seen += 1
    return own.a(hidden)


def averaged(own: Any, hidden: Tensor) -> Tensor:
    """A running mean for evaluation: it is put in the buffer's place, not into it."""
    own.mean = 0.9 * own.mean + 0.1 * hidden.detach().sum()
    return own.a(hidden)


def initialised(own: Any, hidden: Tensor) -> Tensor:
    """By the first data, as in normalising flows."""
    if not own.done:
        own.scale.data.mul_(1 + hidden.detach().abs().mean().nan_to_num(1.0) + 1.0)
        own.done = True
    return own.a(hidden) * own.scale


def renormalised(own: Any, hidden: Tensor) -> Tensor:
    own.a.weight.data /= own.a.weight.data.norm() + 1.0
    return own.a(hidden)


def cooled(own: Any, hidden: Tensor) -> Tensor:
    own.temperature *= 0.9
    return own.a(hidden) * own.temperature


def warmed_up(own: Any, hidden: Tensor) -> Tensor:
    own.calls = getattr(own, "calls", 0) + 1
    return own.a(hidden) / own.calls


def own_noise(own: Any, hidden: Tensor) -> Tensor:
    return own.a(hidden + torch.randn(WIDTH, generator=own.generator).to(hidden.dtype)) + torch.randn(
        (), generator=own.generator
    ).to(hidden.dtype)


def adding(own: Any, hidden: Tensor) -> Tensor:
    own.a(hidden.detach()).pow(2).sum().backward()
    return own.a(hidden)


refused("a buffer that counts", f"seen {FORWARD}", counted, a=linear, seen=lambda: nn.Buffer(torch.zeros(())))
refused("a buffer that is replaced", f"mean {FORWARD}", averaged, a=linear, mean=lambda: nn.Buffer(torch.zeros(())))
refused("a tensor that is replaced", f"mean {FORWARD}", averaged, a=linear, mean=lambda: torch.zeros(()))
refused(
    "a weight set by the first data",
    f"scale {FORWARD}",
    initialised,
    a=linear,
    scale=lambda: weights(WIDTH),
    done=lambda: False,
)
refused("a weight that is renormalised", f"a.weight {FORWARD}", renormalised, a=linear)
refused(
    "a renormalised embedding",
    f"a.weight {FORWARD}",
    lambda own, h: h + own.a(ids(h)) + own.a(torch.arange(WORDS)).sum(),
    a=lambda: nn.Embedding(WORDS, WIDTH, max_norm=0.1),
)
refused(
    "batch norm",
    f"a.running_mean {FORWARD}",
    lambda own, h: own.a(torch.cat([rows(h), torch.ones_like(rows(h)[:1]), -torch.ones_like(rows(h)[:1])]))[
        :-2
    ].view_as(h),
    a=lambda: nn.BatchNorm1d(WIDTH),
)
refused("spectral norm", f"_u {FORWARD}", lambda own, h: own.a(h), a=lambda: parametrizations.spectral_norm(linear()))
refused(
    "spectral norm by hooks",
    f"weight_u {FORWARD}",
    lambda own, h: own.a(h),
    a=lambda: quiet(torch.nn.utils.spectral_norm, linear()),
)
refused("a temperature that cools", f"{ELSE}.*temperature has changed", cooled, a=linear, temperature=lambda: 1.0)
refused("a warm-up that counts calls", f"{ELSE}.*calls has changed", warmed_up, a=linear)
refused("a generator of its own", f"{ELSE}.*generator has changed", own_noise, a=linear, generator=torch.Generator)
refused("the time of day", ELSE, lambda own, h: own.a(h) + time.perf_counter_ns() % 1009 / 1009, a=linear)
refused("backward in the forward", r"calls backward\(\) in its forward", adding, a=linear)
refused(
    "sparse gradients",
    "a has sparse gradients",
    lambda own, h: h + F.embedding(ids(h), own.a, sparse=True),
    a=lambda: weights(WORDS, WIDTH),
)


def hooked(name: str, line: str, register: Callable[[Any], None]) -> None:
    def make(note: Note) -> nn.Module:
        made = Piece(lambda own, h: own.a(h), a=linear(), norm=nn.Buffer(torch.zeros(())))
        register(made)
        return made

    REFUSED[name] = make, line


@torch.no_grad()
def step_at_once(weight: Tensor) -> None:
    """The optimizer in the backward, which saves the memory of gradients."""
    weight.sub_(torch.ones_like(weight) * 0.01)
    weight.grad = None


hooked(
    "a step in the backward",
    f"a.weight {BACKWARD}",
    lambda own: own.a.weight.register_post_accumulate_grad_hook(step_at_once),
)
hooked(
    "a norm that a hook keeps",
    f"norm {BACKWARD}",
    lambda own: own.a.weight.register_hook(lambda gradient: own.norm.add_(gradient.detach().norm() + 1) and None),
)
