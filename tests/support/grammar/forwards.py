"""Pieces whose forward does more than to compute: it differentiates, cuts the graph, draws, chooses, checkpoints or
casts.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .pieces import leaf, linear, mlp, rows, simple

# --- the gradient in the forward --------------------------------------------------------------------


def energy(own: Any, x: Tensor) -> Tensor:
    return torch.tanh(own.a(x)).pow(2).sum()


def force(own: Any, hidden: Tensor, create_graph: bool) -> Tensor:
    with torch.enable_grad():
        x = leaf(hidden)
        return torch.autograd.grad(energy(own, x), x, create_graph=create_graph)[0]


def adapted(own: Any, hidden: Tensor) -> Tensor:
    """One step of gradient descent on its own weight, through which the outer gradient goes."""
    gradient = torch.autograd.grad(own.a(hidden).pow(2).mean(), own.a.weight, create_graph=True)[0]
    return F.linear(hidden, own.a.weight - 0.1 * gradient, own.a.bias)


def by_weight(own: Any, hidden: Tensor) -> Tensor:
    gradient = torch.autograd.grad(own.a(hidden).pow(2).mean(), own.a.weight)[0]
    return own.a(hidden) * (1 + gradient.norm())


def hessian(own: Any, hidden: Tensor) -> Tensor:
    x = leaf(hidden)
    first = torch.autograd.grad(energy(own, x), x, create_graph=True)[0]
    return own.a(x) + torch.autograd.grad(first.sum(), x, create_graph=True)[0]


def penalised(own: Any, hidden: Tensor) -> Tensor:
    """A gradient penalty whose layer is not used otherwise."""
    gradient = force(own, hidden, True)
    return own.b(hidden) + gradient.pow(2).sum().sqrt() * 0.1


simple("force", lambda own, h: own.a(h) + force(own, h, False), a=linear)
simple("force with a graph", lambda own, h: own.a(h) + force(own, h, True), a=linear)
simple("force before use", lambda own, h: (lambda f: own.a(h) * f)(force(own, h, False)), a=linear)
simple("force of detached input", lambda own, h: own.a(h) + force(own, h.detach(), True), a=linear)
simple("gradient penalty", penalised, a=mlp, b=linear)
simple("gradient by a weight", by_weight, a=linear)
simple("a step of descent inside", adapted, a=linear)
simple("second derivative", hessian, a=linear)
simple("torch.func.grad", lambda own, h: own.a(h) + torch.func.grad(lambda x: torch.tanh(own.a(x)).sum())(h), a=linear)
simple("torch.func.vmap", lambda own, h: torch.func.vmap(own.a)(h) if h.dim() > 1 else own.a(h), a=linear)
simple(
    "torch.func.vmap of a grad",
    lambda own, h: torch.func.vmap(torch.func.grad(lambda x: own.a(x).tanh().sum()))(rows(h)).view_as(h) + own.a(h),
    a=linear,
)
simple(
    "torch.func.jvp",
    lambda own, h: torch.func.jvp(lambda x: torch.tanh(own.a(x)), (h,), (torch.ones_like(h),))[1],
    a=linear,
)
simple("an ensemble by vmap", lambda own, h: ensemble(own, h), a=lambda: nn.ModuleList(linear() for _ in range(2)))
simple("forward-mode derivative", lambda own, h: forward_mode(own, h), a=linear)


def ensemble(own: Any, hidden: Tensor) -> Tensor:
    # new leaves, so that these are not trained: what goes on is the mean of both
    stacked, _ = torch.func.stack_module_state(list(own.a))
    made = torch.func.vmap(lambda state, x: torch.func.functional_call(own.a[0], state, (x,)), in_dims=(0, None))(
        stacked, hidden
    )
    return made.mean(0) + own.a[1](hidden)


def forward_mode(own: Any, hidden: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(hidden, torch.ones_like(hidden))
        return torch.autograd.forward_ad.unpack_dual(own.a(dual)).tangent.expand_as(hidden) + own.a(hidden)


# --- what is cut off, or not always there -----------------------------------------------------------


def without_grad(own: Any, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        gate = own.a(hidden).sigmoid()
    return own.b(hidden) * gate


def tried(own: Any, hidden: Tensor) -> Tensor:
    try:
        return own.a(hidden[..., :3])
    except RuntimeError:
        return own.b(hidden)


def after_another(own: Any, hidden: Tensor) -> Tensor:
    """What has been computed is thrown away."""
    try:
        made = own.a(hidden)
        if made.sum() > 0:
            raise ValueError("on purpose")
        return made
    except ValueError:
        return own.b(hidden) + own.a(hidden * 0.5)


def loop(own: Any, hidden: Tensor) -> Tensor:
    for _ in range(int(hidden.detach().abs().sum() * 10) % 3 + 1):
        hidden = torch.tanh(own.a(hidden))
    return hidden


class Unasked(torch.autograd.Function):
    """Zeros, whose gradient it does not pass on; a gradient of zeros would be another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


simple("detached", lambda own, h: own.a(h).detach() + own.b(h), a=linear, b=linear)
simple("no gradient", lambda own, h: Unasked.apply(own.a(h.detach() * torch.inf)) + own.b(h), a=linear, b=linear)
simple("without grad", without_grad, a=linear, b=linear)
simple("straight through", lambda own, h: (lambda y: y + (y.round() - y).detach())(own.a(h)), a=linear)
simple("one of two by the data", lambda own, h: own.a(h) if h.sum() > 0 else own.b(h), a=linear, b=linear)
simple("skipped by the data", lambda own, h: own.a(h) if h.sum() > 0 else h * 2.0, a=linear)
simple("as often as the data says", loop, a=linear)
simple("an exception that is caught", tried, a=linear, b=linear)
simple("an exception after a layer", after_another, a=linear, b=linear)
simple("where", lambda own, h: torch.where(h > 0, own.a(h), own.b(h)), a=linear, b=linear)
simple("routed rows", lambda own, h: routed(own, h), a=linear, b=linear)
simple("left out by Python's random", lambda own, h: h + own.a(h) if random.random() > 0.4 else h * 2.0, a=linear)
simple("left out by numpy's", lambda own, h: h + own.a(h) if numpy.random.rand() > 0.4 else h * 2.0, a=linear)
simple("noise", lambda own, h: own.a(h + torch.randn_like(h) * 0.1), a=linear)


def routed(own: Any, hidden: Tensor) -> Tensor:
    """As experts get their rows: none at all for some, sometimes."""
    flat = rows(hidden)
    first = flat[:, 0] > 0
    made = torch.zeros_like(flat)
    made[first], made[~first] = own.a(flat[first]), own.b(flat[~first])
    return made.view_as(hidden)


# --- checkpointed, cast, packed ---------------------------------------------------------------------

inside = lambda: nn.Sequential(linear(), nn.Dropout(0.4), nn.Tanh(), linear())


def cast(own: Any, hidden: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return own.a(hidden).to(hidden.dtype)


def weight_alone(own: Any, hidden: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.tanh(x) @ own.a.weight, hidden, use_reentrant=True)


def on_host(own: Any, hidden: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return own.b(torch.tanh(own.a(hidden)))


simple("checkpointed", lambda own, h: checkpoint(own.a, h, use_reentrant=False), a=inside)
simple("checkpointed, reentrant", lambda own, h: checkpoint(own.a, leaf(h), use_reentrant=True), a=inside)
simple(
    "checkpointed twice over",
    lambda own, h: checkpoint(lambda x: checkpoint(own.a, x, use_reentrant=False) + own.b(x), h, use_reentrant=False),
    a=inside,
    b=linear,
)
simple(
    "checkpointed twice over, reentrant",
    lambda own, h: checkpoint(
        lambda x: checkpoint(own.a, x, use_reentrant=True) + own.b(x), leaf(h), use_reentrant=True
    ),
    a=inside,
    b=linear,
)
simple(
    "a layer inside and outside of a checkpoint",
    lambda own, h: own.a(checkpoint(own.a, h, use_reentrant=False)),
    a=linear,
)
simple(
    "a layer inside and outside of a reentrant checkpoint",
    lambda own, h: own.a(checkpoint(own.a, leaf(h), use_reentrant=True)),
    a=linear,
)
simple(
    "a weight outside of its layer in two reentrant checkpoints",
    lambda own, h: weight_alone(own, weight_alone(own, leaf(h))),
    a=linear,
)
simple(
    "a checkpointed force",
    lambda own, h: checkpoint(lambda x: own.a(x) + force(own, x, True), h, use_reentrant=False),
    a=linear,
)
simple("autocast", cast, a=mlp)
simple("saved tensors on the host", on_host, a=linear, b=linear)
