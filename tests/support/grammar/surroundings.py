"""Pieces with something around a layer: modes, patches, subclasses, hooks on saved tensors, other types of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .hooked import Linear
from .pieces import WIDTH, WORDS, Note, Piece, ids, linear, piece, simple

# --- modes ------------------------------------------------------------------------------------------


class Rounds(torch.autograd.Function):
    """A fake quantisation: its gradient is that of what it rounds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def rounded(x: Tensor) -> Tensor:
    return (x * 8).round() / 8


def straight_through(x: Tensor) -> Tensor:
    return x + (rounded(x) - x).detach()


class Changed(TorchFunctionMode):
    """``change(arguments)`` of F.linear and F.embedding, and ``after`` of what all functions give."""

    def __init__(self, change: Callable[[tuple], tuple], after: Callable[[Tensor], Tensor] = lambda made: made) -> None:
        super().__init__()
        self.change, self.after = change, after

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        changed = func in (F.linear, F.embedding, torch.embedding, torch._C._nn.linear)
        made = func(*(self.change(args) if changed else args), **(kwargs or {}))
        return self.after(made) if isinstance(made, Tensor) and made.is_floating_point() else made


def weight_by(function: Callable[[Tensor], Tensor]) -> Callable[[tuple], tuple]:
    return lambda args: (args[0], function(args[1]), *args[2:])


def embedding_by(function: Callable[[Tensor], Tensor]) -> Callable[[tuple], tuple]:
    return lambda args: tuple(function(one) if one.is_floating_point() else one for one in args[:2]) + args[2:]


class Noisy(TorchDispatchMode):
    """Every function gives a little more."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 1.01 if isinstance(made, Tensor) and made.is_floating_point() and not made._is_view() else made


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def inside(name: str, make: Callable[[], AbstractContextManager], kind: Callable[[], nn.Module] = linear) -> None:
    def compute(own: Any, hidden: Tensor) -> Tensor:
        with make():
            made = own.a(ids(hidden) if isinstance(own.a, nn.Embedding) else hidden)
        return hidden + made

    simple(name, compute, a=kind)


embedding = partial(nn.Embedding, WORDS, WIDTH)
inside("a mode that rounds weights", lambda: Changed(weight_by(straight_through)))
inside("a mode that rounds weights by a Function", lambda: Changed(weight_by(Rounds.apply)))
inside("a mode that rounds what goes in", lambda: Changed(lambda args: (Rounds.apply(args[0]), *args[1:])))
inside("a mode that rounds what comes out by a Function", lambda: Changed(lambda args: args, Rounds.apply))
inside("a mode that doubles what comes out", lambda: Changed(lambda args: args, lambda made: made * 2))
inside("a mode that rounds an embedding", lambda: Changed(embedding_by(straight_through)), embedding)
inside("a device context", lambda: torch.device("cpu"))
inside("a dispatch mode that changes numbers", Noisy)
inside("a dispatch mode that changes nothing", Plain)

# --- patches ----------------------------------------------------------------------------------------


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    was = getattr(owner, name)
    setattr(owner, name, make(was))
    try:
        yield
    finally:
        setattr(owner, name, was)


def doubled(function: Callable) -> Callable:
    return wraps(function)(lambda *args, **kwargs: function(*args, **kwargs) * 2)


inside("F.linear patched", lambda: patched(F, "linear", lambda was: lambda x, w, b=None: was(x, w * 1.5, b)))
inside("F.linear patched by a Function", lambda: patched(F, "linear", lambda _: lambda x, w, b: Linear.apply(x, w) + b))
inside("F.embedding patched", lambda: patched(F, "embedding", doubled), embedding)
inside("nn.Linear.forward patched", lambda: patched(nn.Linear, "forward", doubled))
inside("nn.Embedding.forward patched", lambda: patched(nn.Embedding, "forward", doubled), embedding)
inside("a cast that layers share", lambda: patched(F, "linear", shared_cast))
simple("another class for a call", lambda own, h: with_class(own.a, Doubled, h), a=linear)
simple("a class with layers for a call", lambda own, h: with_class(own.a, Adapted, h), a=linear)
simple("an input changed in place inside", lambda own, h: with_class(own.a, InPlace, own.b(h)), a=linear, b=linear)
simple("another layer's weight inside", lambda own, h: with_class(own.a, Beside, h, own.b), a=linear, b=linear)
simple("an activation inside", lambda own, h: with_class(own.a, Residual, h, own.b(h)), a=linear, b=linear)


def shared_cast(was: Callable) -> Callable:
    """Twice by one cast of a weight, as quantised caches do."""
    return lambda x, w, b: (lambda cast: was(was(x, cast, b), cast, b))(w * 0.5)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Adapted(nn.Linear):
    """With layers of its own inside."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x.tanh(), self.weight.t())


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class Beside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.beside(x)


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.beside


def with_class(layer: nn.Linear, kind: type, hidden: Tensor, beside: Any = None) -> Tensor:
    layer.__class__, vars(layer)["beside"] = kind, beside
    try:
        return layer(hidden)
    finally:
        layer.__class__ = nn.Linear
        del layer.beside


# --- subclasses, saved tensors, types -----------------------------------------------------------------


class Tripled(Tensor):
    """A tensor for which F.linear is another function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made * 3 if func is F.linear else made


class Quiet(Tensor):
    """A tensor for which nothing is another function."""


def as_subclass(kind: type) -> Callable[[Any, Tensor], Tensor]:
    return lambda own, hidden: hidden + own.a(hidden.as_subclass(kind)).as_subclass(Tensor)


def nested(own: Any, hidden: Tensor) -> Tensor:
    flat = hidden.reshape(-1, WIDTH)
    made = own.a(torch.nested.as_nested_tensor([flat[:1], flat[1:]])) if len(flat) > 1 else own.a(hidden)
    return hidden + (torch.cat(made.unbind()) if made.is_nested else made).view_as(hidden)


def complex_layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)


def complexly(own: Any, hidden: Tensor) -> Tensor:
    made = own.a(torch.complex(hidden.float(), hidden.float().tanh()))
    return hidden + (made * made).real.to(hidden.dtype)


simple("a complex layer", complexly, a=complex_layer)
simple("a tensor for which F.linear is another", as_subclass(Tripled), a=linear)
simple("a tensor of a subclass", as_subclass(Quiet), a=linear)
simple("nested tensors", nested, a=linear)
inside("saved tensors rounded", lambda: saved_tensors_hooks(lambda x: rounded(x), lambda x: x))
inside("saved ids and weights rounded", lambda: saved_tensors_hooks(coarse, lambda x: x), embedding)
inside("saved tensors given out once", lambda: saved_tensors_hooks(lambda x: [x], lambda kept: kept.pop()))


def coarse(x: Tensor) -> Tensor:
    return rounded(x) if x.is_floating_point() else x


@piece("saved tensors counted")
def counted(note: Note) -> nn.Module:
    def told(what: str) -> Callable[[Tensor], Tensor]:
        def tell(x: Tensor) -> Tensor:
            note(what, x)
            return x

        return tell

    def compute(own: Any, hidden: Tensor) -> Tensor:
        with saved_tensors_hooks(told("packed"), told("unpacked")):
            return own.a(hidden)

    return Piece(compute, a=linear())


# --- what else changes a layer ------------------------------------------------------------------------


class LowRank(nn.Module):
    """Beside a frozen layer, as adapters are."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = linear(), linear(WIDTH, 2, bias=False), linear(2, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def frozen_for_a_call(own: Any, hidden: Tensor) -> Tensor:
    own.a.weight.requires_grad_(False)
    made = own.a(hidden)
    own.a.weight.requires_grad_(True)
    return made + own.a(hidden)


def hooked_everywhere(own: Any, hidden: Tensor) -> Tensor:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, made: made * 1.5)
    try:
        return own.a(hidden)
    finally:
        handle.remove()


def selective(own: Any, hidden: Tensor) -> Tensor:
    policy = lambda context, op, *args, **kwargs: (
        CheckpointPolicy.MUST_SAVE
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(lambda x: own.b(own.a(x).tanh()), hidden, use_reentrant=False, context_fn=contexts)


simple("an adapter beside a frozen layer", lambda own, h: own.a(h), a=LowRank)
simple("a weight frozen for a call", frozen_for_a_call, a=linear)
simple("a hook on all layers", hooked_everywhere, a=linear)
simple("selective checkpointing", selective, a=linear, b=linear)
