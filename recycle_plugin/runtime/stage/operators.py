"""Layers whose backward can be split in two: how each type's is, and which types are known.

An :class:`Operator` is one use of a layer's parameters, its backward in two halves.  A :class:`Converter` says how a
layer type's calls become operators; other modules register their own.  runtime/stage/split_backward.py runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Gradients = Iterable[tuple[nn.Parameter, Tensor]]


class Operator(Protocol):
    """One use of a layer's parameters, with the two halves of its backward apart.

    ``x``: the input, any shape; ``gradient``: that of the output, in the output's shape and dtype.
    """

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose gradients :meth:`weight_gradients` gives, in this order."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for ``x``."""

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of ``x``, in its shape; called only when ``x`` requires one."""

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> Gradients:
        """The gradient of each parameter that requires one, in the parameter's shape."""


class LinearOperator:
    """One use of a linear layer, ``x [..., in] @ weight [out, in].T + bias [out]``.

    The two halves of its backward repeat torch's own GEMMs, bit for bit.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.weight, self.bias = weight, bias
        self.parameters = (weight,) if bias is None else (weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """The output, [..., out]."""
        return F.linear(x, self.weight, self.bias)

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of ``x``, [..., in], by the GEMM that torch itself would choose."""
        rows, upper = _rows(x), _rows(gradient)
        if rows.stride() == (1, rows.shape[0]):  # column-major: torch multiplies the transposes
            return self.weight.t().mm(upper.t()).t().view(x.shape)
        return upper.mm(self.weight).view(x.shape)

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> Gradients:
        """The gradients of weight [out, in] and bias [out], where they are trained."""
        rows = _rows(gradient)
        if self.weight.requires_grad:
            yield self.weight, rows.t().mm(_rows(x))
        if self.bias is not None and self.bias.requires_grad:
            # torch folds a contiguous input to two dimensions, adds the bias there and sums there
            yield self.bias, rows.sum(0) if x.is_contiguous() else gradient.sum(tuple(range(gradient.dim() - 1)))


def _rows(x: Tensor) -> Tensor:
    """``x [..., width]`` as torch folds it for a GEMM: [everything else, width], a view where that is possible."""
    return x.flatten(0, -2)


class EmbeddingOperator:
    """One use of an embedding: rows of ``weight [vocabulary, hidden]`` by ``x``, int64 ids of any shape, without a
    gradient.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        self.parameters = (weight,)

    def forward(self, x: Tensor) -> Tensor:
        """The rows, [..., hidden]."""
        return F.embedding(x, self.weight)

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Raises TypeError: the ids of an embedding have no gradient."""
        raise TypeError("the ids of an embedding have no gradient")

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> Gradients:
        """The gradient of the weight, dense, [vocabulary, hidden]."""
        yield self.weight, torch.ops.aten.embedding_dense_backward(gradient, x, self.weight.shape[0], -1, False)


@dataclass(frozen=True)
class Converter:
    """How one exact layer type is converted.

    ``split(module, *args, **kwargs)`` gets the arguments of the module's method ``seam`` and returns the
    operator and its input, or None to run the stock method for this call.  ``supports(module)`` is asked
    once, at conversion.
    """

    seam: str
    split: Callable[..., tuple[Operator, Tensor] | None]
    supports: Callable[[nn.Module], bool] = lambda module: True


CONVERTERS: dict[type[nn.Module], Converter] = {}


def register_converter(kind: type[nn.Module], converter: Converter) -> None:
    """Convert modules whose type is exactly ``kind`` by ``converter`` (a subclass may have another forward)."""
    CONVERTERS[kind] = converter


def _plain_weight(module: nn.Module) -> bool:
    return type(module._parameters.get("weight")) is nn.Parameter


# modules are Any below: of their parameters torch's stubs say no more than Tensor


def _split_linear(module: Any, input: Tensor) -> tuple[Operator, Tensor] | None:
    # a vector takes torch's matrix-vector kernels, and what is not folded for a GEMM its batched ones, which round
    # differently
    unfolded = input.dim() > 2 and not module.weight.requires_grad and not input.is_contiguous()
    return None if input.dim() < 2 or unfolded else (LinearOperator(module.weight, module.bias), input)


def _plain_embedding(module: Any) -> bool:
    options = (module.padding_idx, module.max_norm, module.scale_grad_by_freq, module.sparse)
    return _plain_weight(module) and options == (None, None, False, False)


def _split_embedding(module: Any, input: Tensor) -> tuple[Operator, Tensor]:
    return EmbeddingOperator(module.weight), input


register_converter(nn.Linear, Converter("forward", _split_linear, _plain_weight))
register_converter(nn.Embedding, Converter("forward", _split_embedding, _plain_embedding))
