"""More pieces: custom autograd Functions, and hooks on layers, activations and weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .pieces import WIDTH, Note, Piece, linear, piece, rows, weights

# --- functions --------------------------------------------------------------------------------------


class Told(torch.autograd.Function):
    """Twice its input; tells what it sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Note) -> Tensor:
        ctx.save_for_backward(x)
        ctx.note = note
        note("function forward", x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.note("function backward", gradient * x)
        return gradient * 2, None


class Sorted(torch.autograd.Function):
    """(values, places): the second is no number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.sort(-1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        return values, places

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        return torch.zeros_like(gradient).scatter_(-1, ctx.saved_tensors[0], gradient)


class Linear(torch.autograd.Function):
    """A layer of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, rows(gradient).t() @ rows(x)


class Halves(torch.autograd.Function):
    """Two outputs, one of which may be unused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 0.5, x * 0.25

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        made = [gradient * factor for gradient, factor in ((first, 0.5), (second, 0.25)) if gradient is not None]
        return sum(made[1:], made[0]) if made else None


class Reversed(torch.autograd.Function):
    """Changes the gradient that it is given in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone().neg_()


class Besides(torch.autograd.Function):
    """Gives ``x``, and the auxiliary loss a gradient of one, as mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.shape, loss.dtype
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype = ctx.like
        return gradient, torch.ones(shape, dtype=dtype) * 0.01


class Dirty(torch.autograd.Function):
    """Works in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3.0


def hooked(name: str, compute: Callable[[Any, Tensor], Tensor], **makers: Callable[[], Any]) -> None:
    """One whose ``compute`` finds its journal in ``own.note``."""

    @piece(name)
    def make(note: Note) -> nn.Module:
        return Piece(compute, note=note, **{part: each() for part, each in makers.items()})


hooked("a function that tells", lambda own, h: own.b(Told.apply(own.a(h), own.note)), a=linear, b=linear)
hooked("a function with an output that is no number", lambda own, h: Sorted.apply(own.a(h))[0], a=linear)
hooked("a function with weights", lambda own, h: Linear.apply(h, own.w), w=lambda: weights(WIDTH, WIDTH))
hooked("a function with a layer's weight", lambda own, h: own.a(h) + Linear.apply(h, own.a.weight), a=linear)
hooked("a function, one output unused", lambda own, h: own.b(Halves.apply(own.a(h))[1]), a=linear, b=linear)
hooked(
    "a function, both outputs used",
    lambda own, h: own.b(Halves.apply(own.a(h))[0]) + Halves.apply(own.a(h))[1],
    a=linear,
    b=linear,
)
hooked("gradient reversal", lambda own, h: own.b(Reversed.apply(own.a(h))), a=linear, b=linear)
hooked("an auxiliary loss", lambda own, h: Besides.apply(own.a(h), own.a(h).pow(2).mean()), a=linear)
hooked("a function in place", lambda own, h: own.b(Dirty.apply(own.a(h))), a=linear, b=linear)
hooked(
    "a checkpointed function",
    lambda own, h: checkpoint(lambda x: own.b(Told.apply(own.a(x), lambda *_: None)), h, use_reentrant=False),
    a=linear,
    b=linear,
)


# --- hooks of layers --------------------------------------------------------------------------------


def with_hooks(
    register: Callable[[nn.Module, Note], None], make: Callable[[], nn.Module] = linear
) -> Callable[[Note], nn.Module]:
    def build(note: Note) -> nn.Module:
        layer = make()
        register(layer, note)
        return Piece(lambda own, h: torch.tanh(own.a(h)), a=layer)

    return build


def forward_hooks(layer: nn.Module, note: Note) -> None:
    layer.register_forward_pre_hook(lambda own, given: (given[0] * 1.5,))
    layer.register_forward_hook(lambda own, given, made: note("forward hook", made) or made * 0.5)


def backward_hooks(layer: nn.Module, note: Note) -> None:
    layer.register_full_backward_hook(lambda own, given, made: note("backward hook", made[0]))


def changing_backward_hooks(layer: nn.Module, note: Note) -> None:
    layer.register_full_backward_pre_hook(lambda own, made: (made[0] * 0.5,))
    layer.register_full_backward_hook(lambda own, given, made: given if given[0] is None else (given[0] * 2.0,))


piece("a hook of a norm's sum")(with_hooks(lambda layer, note: accumulated(layer, note), lambda: nn.LayerNorm(WIDTH)))
piece("forward hooks")(with_hooks(forward_hooks))
piece("backward hooks")(with_hooks(backward_hooks))
piece("backward hooks that change gradients")(with_hooks(changing_backward_hooks))
piece("forward hooks of a group")(with_hooks(forward_hooks, lambda: nn.Sequential(linear(), nn.Tanh(), linear())))
piece("backward hooks of a group")(with_hooks(backward_hooks, lambda: nn.Sequential(linear(), nn.Tanh(), linear())))


# --- hooks of weights -------------------------------------------------------------------------------


def telling(layer: nn.Module, note: Note) -> None:
    for name, weight in layer.named_parameters():
        weight.register_hook(partial(lambda name, gradient: note(f"hook of {name}", gradient), name))


def clamping(layer: nn.Module, note: Note) -> None:
    layer.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def normalising(layer: nn.Module, note: Note) -> None:
    layer.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-6))


def accumulated(layer: nn.Module, note: Note) -> None:
    for name, weight in layer.named_parameters():
        weight.register_post_accumulate_grad_hook(
            partial(lambda name, weight: note(f"sum of {name}", weight.grad), name)
        )


def several(layer: nn.Module, note: Note) -> None:
    """Called once all of them have their gradients."""
    torch.autograd.graph.register_multi_grad_hook(
        list(layer.parameters()),
        lambda gradients: [note("all gradients", each) for each in gradients if each is not None],
    )


USES = {  # of a layer's weight
    "": lambda own, h: own.a(h),
    ", used twice": lambda own, h: own.a(torch.tanh(own.a(h))),
    ", used directly too": lambda own, h: own.a(h) + F.linear(h, own.a.weight.t()),
    ", checkpointed": lambda own, h: checkpoint(own.a, h, use_reentrant=False),
    ", used by the data": lambda own, h: own.a(h) if h.sum() > 0 else F.linear(h, own.a.weight, own.a.bias),
}
HOOKS = {
    "a hook of a weight": telling,
    "a clamping hook of a weight": clamping,
    "a normalising hook of a weight": normalising,
    "a hook of a weight's sum": accumulated,
    "a hook of several weights": several,
}


def _hooked_weight(
    register: Callable[[nn.Module, Note], None], compute: Callable[[Any, Tensor], Tensor], note: Note
) -> nn.Module:
    layer = linear()
    register(layer, note)
    return Piece(compute, a=layer)


for hook, register in HOOKS.items():
    for use, compute in USES.items():
        piece(hook + use)(partial(_hooked_weight, register, compute))


# --- hooks of activations ---------------------------------------------------------------------------


def watched(own: Any, hidden: Tensor) -> Tensor:
    made = own.a(hidden)
    if made.requires_grad:
        made.register_hook(lambda gradient: own.note("hook of an activation", gradient))
    return own.b(made)


def scaled(own: Any, hidden: Tensor) -> Tensor:
    made = own.a(hidden)
    if made.requires_grad:
        made.register_hook(lambda gradient: gradient * 0.5)
    return own.b(made)


def scaled_in_place(own: Any, hidden: Tensor) -> Tensor:
    made = torch.tanh(own.a(hidden))
    if made.requires_grad:
        made.register_hook(lambda gradient: gradient.mul_(0.5))
    return own.b(made)


def noisy(own: Any, hidden: Tensor) -> Tensor:
    """Random numbers that are drawn in the backward."""
    made = own.a(hidden)
    if made.requires_grad:
        made.register_hook(lambda gradient: gradient + torch.randn_like(gradient) * 0.1)
    return own.b(made)


def retained(own: Any, hidden: Tensor) -> Tensor:
    """A layer's output whose gradient stays, and is read in a hook further up."""
    made = own.a(hidden)
    if made.requires_grad:
        made.retain_grad()
        if hidden.requires_grad:
            hidden.register_hook(lambda _: own.note("gradient that stays", made.grad))
    return own.b(made)


def node_hook(own: Any, hidden: Tensor) -> Tensor:
    made = own.a(hidden)
    if made.grad_fn is not None:
        made.grad_fn.register_prehook(lambda gradients: own.note("before a node", gradients[0]))
    return own.b(made)


def hook_for_now(own: Any, hidden: Tensor) -> Tensor:
    """On a weight, while the forward runs: nothing comes of it."""
    handle = own.a.weight.register_hook(lambda gradient: gradient * 100)
    made = own.a(hidden)
    handle.remove()
    return made


hooked("a hook of an activation", watched, a=linear, b=linear)
hooked("a scaling hook of an activation", scaled, a=linear, b=linear)
hooked("a hook of an activation, in place", scaled_in_place, a=linear, b=linear)
hooked("noise in the backward", noisy, a=linear, b=linear)
hooked("a gradient that stays", retained, a=linear, b=linear)
hooked("a hook of a node", node_hook, a=linear, b=linear)
hooked("a hook for now", hook_for_now, a=linear)
