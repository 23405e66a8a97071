"""Converters that split the backward of megatron-core's parallel layers; importing this module registers them.

In ColumnParallelLinear and RowParallelLinear ``_forward_impl`` is replaced. The communication around it stays
megatron-core's, and so does the bias that ``skip_bias_add`` leaves to a later, fused kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.utils import get_pg_size
from torch import Tensor, nn

from recycle_plugin.runtime.stage.converters import Call, Converter, Halves, register_converter


class ParallelLinear(Halves):
    """``LinearWithGradAccumulationAndAsyncCommunication`` with a backward in two halves, input and weight, in
    megatron-core's own arithmetic. ``group``: the tensor-parallel group that sums the input's gradient, or None.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any) -> Tensor:
        """Return ``x [..., in] @ weight [out, in].T + bias [out]``."""
        ctx.save_for_backward(x, weight)
        ctx.group = group
        output = torch.matmul(x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Return the gradients that autograd asks for: those of the input, or of weight and bias, or all."""
        x, weight = ctx.saved_tensors
        of_x, of_parameters = Halves.asked(ctx)
        mine = gradient.matmul(weight) if of_x else None
        if mine is not None and ctx.group is not None:
            torch.distributed.all_reduce(mine, group=ctx.group)
        if not of_parameters:
            return mine, None, None, None
        rows = gradient.flatten(0, -2)
        return mine, rows.t().mm(x.flatten(0, -2)), rows.sum(0) if ctx.needs_input_grad[2] else None, None


def _stock() -> tuple[Any, ...]:
    """Return the functions of megatron-core that ParallelLinear replaces, to see whether a script has patched them."""
    function = layers.LinearWithGradAccumulationAndAsyncCommunication
    return (
        ColumnParallelLinear._forward_impl,
        RowParallelLinear._forward_impl,
        layers.linear_with_grad_accumulation_and_async_allreduce,
        function,
        function.forward,
        function.backward,
    )


_STOCK = _stock()


def _call(
    module: nn.Module,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Any] | None = None,
    tp_group: Any = None,
    **_: Any,
) -> Call | None:
    known = type(weight) is nn.Parameter and not (gradient_accumulation_fusion or sequence_parallel)
    # not converted: megatron's own deferral of the head's weight gradient, a frozen weight, a patched function
    if not known or grad_output_buffer is not None or not weight.requires_grad or _stock() != _STOCK:
        return None
    return (lambda x: ParallelLinear.apply(x, weight, bias, tp_group if allreduce_dgrad else None)), input


def _whole_vocabulary(module: VocabParallelEmbedding) -> bool:
    return get_pg_size(module.tp_group) == 1 and not (module.deterministic_mode or module.reduce_scatter_embeddings)


def _call_embedding(module: VocabParallelEmbedding, input_: Tensor) -> Call:
    return partial(VocabParallelEmbedding.forward, module), input_


register_converter(ColumnParallelLinear, Converter("_forward_impl", _call))
register_converter(RowParallelLinear, Converter("_forward_impl", _call))
register_converter(VocabParallelEmbedding, Converter(call=_call_embedding, supports=_whole_vocabulary))
