"""What goes into the first stage, from stage to stage, and into the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .pieces import WIDTH, WORDS, ids, linear

Give = Callable[[nn.Module, Tensor, Tensor], Any]  # (own layer, hidden, what the stage got) -> what travels
Take = Callable[[nn.Module, Any], Tensor]  # (own layer, what has come) -> hidden
BOUNDARIES: dict[str, tuple[Give, Take]] = {
    "a tensor": (lambda a, h, x: h, lambda a, given: given),
    "a tuple of one": (lambda a, h, x: (h,), lambda a, given: given[0]),
    "ids, a mask and no dimension": (
        lambda a, h, x: (ids(h), h, h[..., :1] > 0, h.pow(2).mean()),
        lambda a, given: given[1].masked_fill(given[2], 0.1) + (given[0] % 2).unsqueeze(-1) + given[3],
    ),
    "the same twice": (lambda a, h, x: (h, h), lambda a, given: given[0] * 2 + given[1]),
    "one unused": (lambda a, h, x: (h, a(h)), lambda a, given: given[0]),
    "one whose gradient is infinite, unused": (
        lambda a, h, x: (h, (h - h).pow(2).sum().sqrt()),
        lambda a, given: given[0],
    ),
    "one detached": (lambda a, h, x: (h, a(h).detach()), lambda a, given: given[0] + given[1]),
    "a weight": (lambda a, h, x: (h, a.weight), lambda a, given: given[0] @ given[1]),
    "a weight's transpose": (lambda a, h, x: (h, a.weight.t()), lambda a, given: given[0] @ given[1]),
    "a workspace": (lambda a, h, x: (h, workspace(a, h)), lambda a, given: given[0] + given[1]),
    "a complex tensor": (
        lambda a, h, x: torch.complex(h.float(), a(h).float()),
        lambda a, given: (given.real + given.imag).to(a.weight.dtype),
    ),
    "a conjugate": (
        lambda a, h, x: (torch.complex(h.float(), a(h).float()).conj(), h),
        lambda a, given: (given[0].real - given[0].imag).to(given[1].dtype) + given[1],
    ),
    "views": (lambda a, h, x: a(h).chunk(2, -1), lambda a, given: torch.cat(given[::-1], -1)),
    "what came": (
        lambda a, h, x: (a(h), x if torch.is_tensor(x) and x.shape == h.shape and x.dtype == h.dtype else h),
        lambda a, given: given[0] + given[1],
    ),
    "not contiguous": (lambda a, h, x: a(h).transpose(0, -1).contiguous().transpose(0, -1), lambda a, given: a(given)),
    "expanded": (lambda a, h, x: (h, h.mean().expand(2, 3)), lambda a, given: given[0] + given[1].sum()),
    "nothing in it": (lambda a, h, x: (h, h.reshape(-1)[:0]), lambda a, given: given[0] + given[1].sum()),
    "an empty mask": (
        lambda a, h, x: (h, torch.empty(0, 0, dtype=torch.bool)),  # as the mark of a tuple of one
        lambda a, given: given[0] * (1 + given[1].numel()),
    ),
    "bf16": (lambda a, h, x: (h.bfloat16(), h), lambda a, given: given[0].to(given[1].dtype) + given[1]),
}
"""A tuple's members are views, weights, of other types, used twice or not at all: ``a`` is a layer of the stage's
own.
"""


def workspace(layer: nn.Module, hidden: Tensor) -> Tensor:
    if "space" not in vars(layer):
        layer.space = torch.zeros(1000, dtype=hidden.dtype)
    return layer.space[: hidden.numel()].copy_(hidden.detach().reshape(-1) * 2).view(hidden.shape)


CAN_NOT_TRAVEL: dict[str, tuple[Give, str]] = {
    "None": (lambda a, h, x: (h, None), "the last layer of a stage gives NoneType"),
    "a dict": (lambda a, h, x: {"hidden": h}, "the last layer of a stage gives dict"),
    "a list": (lambda a, h, x: [h], "the last layer of a stage gives list"),
    "a number": (lambda a, h, x: (h, 1.0), "the last layer of a stage gives float"),
    "an empty tuple": (lambda a, h, x: (), "the last layer of a stage gives an empty tuple"),
    "a sparse tensor": (
        lambda a, h, x: (h, h.detach().reshape(-1, WIDTH).to_sparse()),
        "the last layer of a stage gives a sparse tensor",
    ),
}
"""With what the refusal says."""


@dataclass(frozen=True)
class Data:
    """``make(random numbers, length)``: one micro-batch's inputs; ``enter(own layer, inputs)``: the hidden
    activation.
    """

    make: Callable[[torch.Generator, int], Any]
    enter: Callable[[nn.Module, Any], Tensor]
    layer: Callable[[], nn.Module] = linear


def vectors(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=generator)


def masked_words(generator: torch.Generator, length: int) -> tuple[Tensor, Tensor]:
    made = torch.randint(WORDS, (2, length), generator=generator)
    return made, made < 5


words = lambda: nn.Embedding(WORDS, WIDTH)

DATA: dict[str, Data] = {
    "vectors": Data(lambda g, n: vectors(g, 2, n), lambda a, given: given),
    "vectors of one length": Data(lambda g, n: vectors(g, 2, 3), lambda a, given: a(given)),
    "words": Data(lambda g, n: torch.randint(WORDS, (2, n), generator=g), lambda a, given: a(given), words),
    "words and a mask": Data(
        masked_words, lambda a, given: a(given[0]).masked_fill(given[1].unsqueeze(-1), 0.0), words
    ),
    "rows": Data(lambda g, n: vectors(g, n), lambda a, given: a(given)),
    "one vector": Data(lambda g, n: vectors(g), lambda a, given: a(given)),
    "one row": Data(lambda g, n: vectors(g, 1), lambda a, given: a(given)),
    "nothing": Data(lambda g, n: vectors(g, 0, n), lambda a, given: a(given)),
    "not contiguous": Data(lambda g, n: vectors(g, n, 2).transpose(0, 1), lambda a, given: a(given)),
    "expanded": Data(lambda g, n: vectors(g, 1, n).expand(2, n, WIDTH), lambda a, given: a(given)),
    "a list": Data(lambda g, n: [vectors(g, 2, n), vectors(g, 2, n)], lambda a, given: a(given[0]) + given[1]),
    "tuple in a tuple": Data(
        lambda g, n: (vectors(g, 2, n), (vectors(g, 2, n), None)), lambda a, given: a(given[0]) + given[1][0]
    ),
}


class Scored(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = linear(WIDTH, 1)

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (self.head(outputs) - labels).pow(2).mean()


def classified(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        outputs.reshape(-1, WIDTH), (labels.abs() * 10).long().expand(outputs.numel() // WIDTH) % WIDTH
    )


Loss = Callable[[Any, Tensor], Any]

LOSSES: dict[str, Callable[[], Loss]] = {
    "mean square": lambda: lambda outputs, labels: (outputs - labels).pow(2).mean(),
    "of one dimension": lambda: lambda outputs, labels: (outputs - labels).pow(2).mean().reshape(1),
    "cross entropy": lambda: classified,
    "with a weight": Scored,
    "an exponential": lambda: lambda outputs, labels: torch.logsumexp(outputs.reshape(-1), 0) + labels,
}
NO_LOSSES: dict[str, tuple[Loss, str]] = {
    "a tuple": (lambda outputs, labels: (outputs.mean(), labels), "is a tuple"),
    "a dict": (lambda outputs, labels: {"loss": outputs.mean()}, "is a dict"),
    "one for each": (
        lambda outputs, labels: torch.cat([outputs.reshape(-1), outputs.new_zeros(2)]),
        "is a tensor of shape",
    ),
    "a number": (lambda outputs, labels: outputs.mean().item(), "is a float"),
    "detached": (lambda outputs, labels: outputs.mean().detach(), "is computed from nothing that is trained"),
    "complex": (lambda outputs, labels: torch.complex(outputs.mean(), labels), "is of type complex64"),
    "a whole number": (lambda outputs, labels: outputs.sum().long(), "is of type int64"),
}
"""With what the refusal says."""
