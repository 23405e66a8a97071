"""Layer types whose backward can be split: which method of a layer gets a graph of its own.

A :class:`Converter` names that method for one layer type; other modules may register theirs.
runtime/stage/split_backward.py runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Call = tuple[Callable[[Tensor], Tensor], Tensor]  # a function and its one tensor argument


@dataclass(frozen=True)
class Converter:
    """How one exact layer type is converted.

    ``seam``: the method that is replaced. ``call(module, *args, **kwargs)``: gets the method's arguments and returns
    what to run instead; None runs this call unsplit. By default the method itself runs, whatever it is then.
    ``supports(module)``: asked once, at conversion.
    """

    seam: str = "forward"
    call: Callable[..., Call | None] | None = None
    supports: Callable[[nn.Module], bool] = lambda module: True

    def of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Return a function to run instead of the method; None to run the method unsplit."""
        if self.call is not None:
            return self.call(module, *args, **kwargs)
        if kwargs and kwargs.keys() == {"input"}:
            args, kwargs = (*args, kwargs["input"]), {}
        return None if kwargs or len(args) != 1 else (partial(getattr(type(module), self.seam), module), args[0])


CONVERTERS: dict[type[nn.Module], Converter] = {}


def register_converter(kind: type[nn.Module], converter: Converter) -> None:
    """Convert modules whose type is exactly ``kind`` with ``converter``."""
    CONVERTERS[kind] = converter


class Halves(torch.autograd.Function):
    """A custom Function whose backward computes only the half that is asked for. Its first argument is the input, its
    other tensors are parameters. autograd's own nodes skip what is not asked for; a custom Function has to check.
    """

    @staticmethod
    def asked(ctx: Any) -> tuple[bool, bool]:
        """Return whether this run of autograd wants the input's gradient, and whether it wants the parameters'."""
        (of_input, _), *others = ctx.next_functions
        executes = torch._C._will_engine_execute_node
        parameters = any(node is not None and executes(node) for node, _ in others)
        return ctx.needs_input_grad[0] and (not parameters or executes(of_input)), parameters


def _plain_weight(module: nn.Module) -> bool:
    return type(module._parameters.get("weight")) is nn.Parameter


def _plain_embedding(module: Any) -> bool:
    return _plain_weight(module) and module.max_norm is None and not module.sparse


register_converter(nn.Linear, Converter(supports=_plain_weight))
register_converter(nn.Embedding, Converter(supports=_plain_embedding))
