"""The grammar of the differential tester: what models are made of, a small module with a name each, which keeps the
shape ``[..., WIDTH]``.

What a piece sees of a gradient, or counts, it tells its journal (tests/torch/differential.py).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

WIDTH, WORDS = 6, 9
Note = Callable[[str, Tensor], None]  # (what, its value): tells the journal
PIECES: dict[str, Callable[[Note], nn.Module]] = {}


class Piece(nn.Module):
    """``compute(self, hidden)`` over ``parts``: modules, parameters, or whatever else."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.compute(self, hidden)


class Evaluated(Piece):
    """Stays in evaluation whatever is said to the model."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


def piece(name: str) -> Callable:
    def register(make: Callable[[Note], nn.Module]) -> Callable[[Note], nn.Module]:
        PIECES[name] = make
        return make

    return register


def simple(name: str, compute: Callable[[Any, Tensor], Tensor], **makers: Callable[[], Any]) -> None:
    """One that tells nothing.  ``makers``: of its parts."""
    PIECES[name] = lambda note: Piece(compute, **{part: make() for part, make in makers.items()})


def linear(inner: int = WIDTH, outer: int = WIDTH, **more: Any) -> nn.Linear:
    return nn.Linear(inner, outer, **more)


def weights(*shape: int, **more: Any) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, **more) * 0.3)


def rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, WIDTH)


def sequence(hidden: Tensor) -> Tensor:
    return hidden.reshape(1, -1, WIDTH)


def ids(hidden: Tensor) -> Tensor:
    return (hidden.detach().abs()[..., 0] * 7).nan_to_num(0.0, 0.0, 0.0).long() % WORDS


def leaf(hidden: Tensor) -> Tensor:
    return hidden if hidden.requires_grad else hidden.detach().requires_grad_()


# --- usual layers -----------------------------------------------------------------------------------

mlp = lambda: nn.Sequential(linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.3), linear(2 * WIDTH, WIDTH))

simple("linear", lambda own, h: own.a(h), a=linear)
simple("linear without bias", lambda own, h: own.a(h), a=partial(linear, bias=False))
simple("perceptron with dropout", lambda own, h: own.a(h), a=mlp)
simple("residual", lambda own, h: h + own.a(h), a=mlp)
simple("layer norm", lambda own, h: own.a(h), a=lambda: nn.LayerNorm(WIDTH))
simple("group norm", lambda own, h: own.a(rows(h)).view_as(h), a=lambda: nn.GroupNorm(2, WIDTH))
simple(
    "convolution",
    lambda own, h: own.a(sequence(h).transpose(1, 2)).transpose(1, 2).reshape(h.shape),
    a=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
)
simple(
    "LSTM",
    lambda own, h: own.a(sequence(h))[0].reshape(h.shape),
    a=lambda: nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2),
)
simple("GRU", lambda own, h: own.a(sequence(h))[0].reshape(h.shape), a=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True))
simple(
    "attention",
    lambda own, h: own.a(*3 * (sequence(h),))[0].reshape(h.shape),
    a=lambda: nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True),
)
simple(
    "transformer",
    lambda own, h: own.a(sequence(h)).reshape(h.shape),
    a=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.2, batch_first=True),
)
simple("embedding", lambda own, h: h + own.a(ids(h)), a=lambda: nn.Embedding(WORDS, WIDTH))
simple("embedding with padding", lambda own, h: h + own.a(ids(h)), a=lambda: nn.Embedding(WORDS, WIDTH, padding_idx=0))
simple(
    "embedding by frequency",
    lambda own, h: h + own.a(ids(h)),
    a=lambda: nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True),
)
simple(
    "bag of embeddings",
    lambda own, h: h + own.a(ids(h).reshape(1, -1)),
    a=lambda: nn.EmbeddingBag(WORDS, WIDTH, mode="mean"),
)
simple("bilinear", lambda own, h: own.a(rows(h), rows(h) * 2).view_as(h), a=lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH))
simple("PReLU", lambda own, h: own.b(own.a(h)), a=linear, b=nn.PReLU)
simple(
    "chunk and cat",
    lambda own, h: torch.cat([own.a(h.chunk(2, -1)[1]), own.b(h.chunk(2, -1)[0])], -1),
    a=lambda: linear(3, 3),
    b=lambda: linear(3, 3),
)
simple("einsum", lambda own, h: torch.einsum("...i,oi->...o", h, own.w), w=lambda: weights(WIDTH, WIDTH))
simple("dropout in evaluation", lambda own, h: own.a(h), a=lambda: Evaluated(lambda own, h: own.a(h), a=mlp()))
simple(
    "a list of heads",
    lambda own, h: sum(part(h) for part in own.a) / 3,
    a=lambda: nn.ModuleList(linear() for _ in range(3)),
)
simple(
    "parameters in a list",
    lambda own, h: h * own.a[0] + own.a[1],
    a=lambda: nn.ParameterList([weights(WIDTH), weights(WIDTH)]),
)
simple(
    "a weight of the activation's shape",
    lambda own, h: own.a(h) + (own.w if h.shape == own.w.shape else own.w[0, 0]),
    a=linear,
    w=lambda: weights(2, 3, WIDTH),
)
simple(
    "layers without width",
    lambda own, h: own.b(own.a(h)) + h,
    a=lambda: quiet(linear, WIDTH, 0),
    b=lambda: quiet(linear, 0, WIDTH),
)


def quiet(make: Callable, *arguments: Any) -> nn.Module:
    """Without the warning that there is nothing to initialise, or that this is the old way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*arguments)


# --- shapes, views and what is changed in place -----------------------------------------------------

simple("ReLU in place", lambda own, h: own.b(torch.relu_(own.a(h))), a=linear, b=linear)
simple("add in place", lambda own, h: own.b(own.a(h).add_(1.0).mul_(0.5)), a=linear, b=linear)
simple("a view changed in place", lambda own, h: changed_view(own.a(h)), a=linear)
simple("input changed in place", lambda own, h: own.a(h.mul_(0.5)), a=linear)
simple("output into a new tensor", lambda own, h: torch.empty_like(h).copy_(own.a(h)), a=linear)
simple("gives its input", lambda own, h: h)
simple("gives a view of its input", lambda own, h: h.view_as(h))
simple("not contiguous", lambda own, h: own.a(rows(h).t().contiguous().t()).view(h.shape), a=linear)
simple(
    "gives something not contiguous", lambda own, h: own.a(h).transpose(0, -1).contiguous().transpose(0, -1), a=linear
)
simple("strided", lambda own, h: own.a(torch.stack([h, h], -1)[..., 1]), a=linear)
simple(
    "transposed for the layer",
    lambda own, h: own.a(h.transpose(0, -2)).transpose(0, -2) if h.dim() > 1 else own.a(h),
    a=linear,
)
simple(
    "expanded", lambda own, h: h + own.a(rows(h).mean(0, keepdim=True)).expand(rows(h).shape).reshape(h.shape), a=linear
)
simple("expanded input", lambda own, h: h + own.a(rows(h)[:1].expand(4, WIDTH)).sum(0), a=linear)
simple("nothing in it", lambda own, h: torch.cat([own.a(rows(h)[:0]), own.a(rows(h))]).view_as(h), a=linear)
simple("one vector", lambda own, h: h + own.a(rows(h).sum(0)), a=linear)
simple("a lambda", lambda own, h: torch.tanh(h))
simple("unbound forward", lambda own, h: own.a(h) + nn.Linear.forward(own.a, h), a=linear)
simple("forward called directly", lambda own, h: own.a.forward(h), a=linear)
simple("keyword argument", lambda own, h: own.a(input=h), a=linear)


def changed_view(hidden: Tensor) -> Tensor:
    hidden[..., :3].mul_(2.0)
    return hidden


# --- weights that are shared, unused, frozen, odd ---------------------------------------------------


@piece("one weight in two layers")
def _two_layers(note: Note) -> nn.Module:
    made = Piece(lambda own, h: own.b(torch.tanh(own.a(h))), a=linear(), b=linear())
    made.b.weight = made.a.weight
    return made


@piece("one weight in a layer and an embedding")
def _tied_inside(note: Note) -> nn.Module:
    made = Piece(
        lambda own, h: h + own.b(own.a(ids(h)))[..., :WIDTH], a=nn.Embedding(WORDS, WIDTH), b=linear(WIDTH, WORDS)
    )
    made.b.weight = made.a.weight
    return made


@piece("one weight in a layer and a layer norm")
def _fused_shares(note: Note) -> nn.Module:
    made = Piece(lambda own, h: own.b(own.a(h)), a=linear(), b=nn.LayerNorm(WIDTH))
    made.b.bias = made.a.bias
    return made


@piece("one layer under two names")
def _two_names(note: Note) -> nn.Module:
    layer = linear()
    return Piece(lambda own, h: own.a(torch.tanh(own.b(h))), a=layer, b=layer)


simple("a layer called three times", lambda own, h: own.a(torch.tanh(own.a(torch.tanh(own.a(h))))), a=linear)
simple("a layer called on both halves", lambda own, h: own.a(h) + own.a(-h), a=linear)
simple("a weight used by its layer and directly", lambda own, h: own.a(h) + F.linear(h, own.a.weight.t()), a=linear)
simple("a weight used directly before its layer", lambda own, h: own.a(F.linear(h, own.a.weight.t()) * 0.5), a=linear)
simple("a weight used directly only", lambda own, h: F.linear(h, own.a.weight, own.a.bias), a=linear)
simple("a penalty on the weight", lambda own, h: own.a(h) * (1 + own.a.weight.pow(2).mean()), a=linear)
simple("a bias used directly", lambda own, h: own.a(h) * own.a.bias, a=linear)
simple(
    "an embedding's weight used directly",
    lambda own, h: h + own.a(ids(h)) + own.a.weight.mean(0),
    a=lambda: nn.Embedding(WORDS, WIDTH),
)
simple("a weight of a detached copy", lambda own, h: own.a(h) + F.linear(h, own.a.weight.detach()), a=linear)
simple(
    "a copy made in the forward",
    lambda own, h: own.a(h) + copy.deepcopy(own.a).requires_grad_(False)(h).detach(),
    a=linear,
)
simple(
    "a weight used three times, in both ways",
    lambda own, h: own.a(torch.tanh(own.a(h))) + F.linear(h, own.a.weight.t()),
    a=linear,
)
simple("an unused layer", lambda own, h: own.a(h), a=linear, b=linear)
simple("a frozen layer", lambda own, h: own.b(own.a(h)), a=lambda: linear().requires_grad_(False), b=linear)
simple("a frozen weight", lambda own, h: own.a(h), a=lambda: frozen(linear(), "weight"))
simple("a frozen bias", lambda own, h: own.a(h), a=lambda: frozen(linear(), "bias"))
simple(
    "a complex weight",
    lambda own, h: (torch.complex(h.float(), h.float() * 0.5) * own.w).real.to(h.dtype),
    w=lambda: weights(WIDTH, dtype=torch.complex64),
)
simple(
    "spectrum",
    lambda own, h: torch.fft.irfft(torch.fft.rfft(own.a(h).float()) * own.w, WIDTH).to(h.dtype),
    a=linear,
    w=lambda: weights(WIDTH // 2 + 1, dtype=torch.complex64),
)
simple(
    "a whole-number weight",
    lambda own, h: own.a(h) * own.w,
    a=linear,
    w=lambda: nn.Parameter(torch.arange(WIDTH) % 3, requires_grad=False),
)
simple("a double-precision part", lambda own, h: own.a(h.double()).to(h.dtype), a=lambda: linear().double())
simple("a bf16 part", lambda own, h: own.a(h.bfloat16()).to(h.dtype), a=lambda: linear().bfloat16())
simple(
    "a buffer that is read",
    lambda own, h: own.a(h) * own.shift,
    a=linear,
    shift=lambda: nn.Buffer(torch.ones(WIDTH) * 2),
)
simple("a cache that the first forward fills", lambda own, h: own.a(h) * cached(own), a=linear)
simple("keeps its output", lambda own, h: kept(own, own.a(h)), a=linear)


def frozen(layer: nn.Module, name: str) -> nn.Module:
    getattr(layer, name).requires_grad_(False)
    return layer


def cached(own: Any) -> Tensor:
    if "angles" not in vars(own):
        own.angles = torch.arange(WIDTH).float().cos()
    return own.angles


def kept(own: Any, hidden: Tensor) -> Tensor:
    own.last = hidden
    return own.last * 1.0


# --- weights that are computed ----------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@piece("a parametrization")
def _symmetric(note: Note) -> nn.Module:
    layer = linear()
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return Piece(lambda own, h: own.a(h), a=layer)


@piece("a parametrization, cached")
def _cached_symmetric(note: Note) -> nn.Module:
    def compute(own: Any, hidden: Tensor) -> Tensor:
        with parametrize.cached():
            return own.a(torch.tanh(own.a(hidden)))

    layer = linear()
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return Piece(compute, a=layer)


@piece("a weight that a forward pre-hook computes")
def _computed(note: Note) -> nn.Module:
    layer = linear()
    raw = nn.Parameter(layer.weight.detach().clone())
    del layer._parameters["weight"]
    layer.register_parameter("raw", raw)
    layer.register_forward_pre_hook(lambda own, given: setattr(own, "weight", own.raw * 0.5))
    return Piece(lambda own, h: own.a(h), a=layer)


simple("weight norm", lambda own, h: own.a(h), a=lambda: parametrizations.weight_norm(linear()))
simple("weight norm by hooks", lambda own, h: own.a(h), a=lambda: quiet(torch.nn.utils.weight_norm, linear()))
simple(
    "spectral norm in evaluation",
    lambda own, h: own.a(h),
    a=lambda: Evaluated(lambda own, h: own.a(h), a=parametrizations.spectral_norm(linear())),
)
simple(
    "spectral norm by hooks, in evaluation",
    lambda own, h: own.a(h),
    a=lambda: Evaluated(lambda own, h: own.a(h), a=torch.nn.utils.spectral_norm(linear())),
)
simple(
    "functional call with a derived weight",
    lambda own, h: torch.func.functional_call(own.a, {"weight": own.a.weight * own.g.sigmoid()}, (h,)),
    a=linear,
    g=lambda: weights(1),
)
simple(
    "functional call with a weight of another's",
    lambda own, h: torch.func.functional_call(own.a, {"weight": own.w}, (h,)),
    a=linear,
    w=lambda: weights(WIDTH, WIDTH),
)
simple(
    "functional call twice",
    lambda own, h: own.a(h) + torch.func.functional_call(own.a, {"weight": own.a.weight * 0.5}, (h,)),
    a=linear,
)
