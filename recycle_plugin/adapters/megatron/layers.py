"""How megatron-core's parallel layers are split; importing this module registers it.

Column- and RowParallelLinear are converted at ``_forward_impl``, behind their communication and before
the bias that ``skip_bias_add`` leaves to a later kernel (that bias stays fused, a sum of rows).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.utils import get_pg_size
from torch import Tensor, nn

from recycle_plugin.runtime.stage.operators import (
    Converter,
    EmbeddingOperator,
    LinearOperator,
    Operator,
    register_converter,
)


class ParallelLinearOperator(LinearOperator):
    """One use of a parallel linear layer of megatron-core's, ``LinearWithGradAccumulationAndAsyncCommunication`` in
    halves.

    ``group``: the tensor-parallel group over which I sums the input's gradient, or None.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Any) -> None:
        super().__init__(weight, bias)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """The output, in megatron-core's own arithmetic."""
        output = torch.matmul(x, self.weight.t())
        return output if self.bias is None else output + self.bias

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of ``x``, in its shape, summed over the tensor-parallel group."""
        mine = gradient.matmul(self.weight)
        if self.group is not None:
            torch.distributed.all_reduce(mine, group=self.group)
        return mine


def _split_linear(
    module: nn.Module,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list | None = None,
    tp_group: Any = None,
    **_: Any,
) -> tuple[Operator, Tensor] | None:
    known = type(weight) is nn.Parameter and not (gradient_accumulation_fusion or sequence_parallel)
    if not known or grad_output_buffer is not None:  # megatron's own deferral of the head's weight gradient
        return None
    return ParallelLinearOperator(weight, bias, tp_group if allreduce_dgrad else None), input


def _whole_vocabulary(module: VocabParallelEmbedding) -> bool:
    return get_pg_size(module.tp_group) == 1 and not (module.deterministic_mode or module.reduce_scatter_embeddings)


def _split_embedding(module: VocabParallelEmbedding, input_: Tensor) -> tuple[Operator, Tensor]:
    return EmbeddingOperator(module.weight), input_


register_converter(ColumnParallelLinear, Converter("_forward_impl", _split_linear))
register_converter(RowParallelLinear, Converter("_forward_impl", _split_linear))
register_converter(VocabParallelEmbedding, Converter("forward", _split_embedding, _whole_vocabulary))
