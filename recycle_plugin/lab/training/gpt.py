"""A GPT of megatron-core transformer layers (local spec) as DeepSpeed ``LayerSpec``s.

The same code runs on CPU and CUDA: weights are made on the CPU, ``PipelineModule`` moves them, and tensors that a layer
makes later are on its input's device. megatron-core's ``parallel_state`` is not initialised: the layers get groups of
one member that never communicate, so changes of the job's membership do not reach them. ``torch.distributed`` has to be
initialised before the layers are built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from recycle_plugin.adapters.megatron import layers as _register_converters  # noqa: F401
from recycle_plugin.patches import megatron_cpu


@dataclass(frozen=True)
class GPTShape:
    """The sizes that determine the model's parameters. ``layers``: transformer layers; ``sequence``: tokens of context;
    ``tied``: the head's weights are the embedding's.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 256
    dropout: float = 0.1
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"model.{name} is {value!r}: it has to be a whole number, at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"model.hidden is {self.hidden}: it has to be a multiple of model.heads, {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout is {self.dropout}: it has to be at least 0 and below 1")

    def parameters(self) -> int:
        """Return the number of parameters, with embedding and head."""
        h = self.hidden
        attention, mlp, norms = 4 * h * h + 4 * h, 8 * h * h + 5 * h, 4 * h
        ends = ((1 if self.tied else 2) * self.vocabulary + self.sequence) * h + 2 * h
        return self.layers * (attention + mlp + norms) + ends


def gpt_layers(shape: GPTShape, params_dtype: torch.dtype = torch.float32, seed: int = 1234) -> list[LayerSpec]:
    """Return specs for ``PipelineModule``: embedding, ``shape.layers`` transformer layers, norm with head.

    A tied head is a spec of its own behind the norm. Ids are int64 [batch, sequence], activations [sequence, batch,
    hidden], logits [sequence, batch, vocabulary], the last two in ``params_dtype``. Layer i draws its weights from
    ``seed + i`` in fp32, so they are equal in every replica, partition and precision.

    Leave ``PipelineModule(seed_layers=False)``. With ``seed_layers`` it also reseeds before each layer's forward, from
    a count that differs between workers, so callers could not control the dropout masks.
    """
    middle = [LayerSpec(GPTBlock, shape, number, params_dtype, seed + number) for number in range(1, shape.layers + 1)]
    if not shape.tied:
        return [
            LayerSpec(GPTEmbedding, shape, params_dtype, seed),
            *middle,
            LayerSpec(GPTHead, shape, params_dtype, seed + shape.layers + 1),
        ]
    embedding = partial(
        TiedLayerSpec, "embedding", GPTEmbedding, shape, params_dtype, seed, tied_weight_attr="tokens.weight"
    )
    return [embedding(), *middle, LayerSpec(GPTNorm, shape, params_dtype), embedding(forward_fn=tied_logits)]


def gpt_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy (fp32): logits [sequence, batch, vocabulary], int64 labels [batch, sequence]."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.t().flatten())


class GPTEmbedding(nn.Module):
    """Token and learned position embeddings, then dropout: ids [batch, sequence] to [sequence, batch, hidden].
    Sequences shorter than ``shape.sequence`` are fine; longer ones raise IndexError.
    """

    def __init__(self, shape: GPTShape, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        with _seeded(seed):
            config = transformer_config(shape, dtype)
            self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
            self.positions = nn.Embedding(shape.sequence, shape.hidden)
            for table in (self.tokens, self.positions):
                config.embedding_init_method(table.weight)
        self.to(dtype)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """Return activations [sequence, batch, hidden] of int64 ids [batch, sequence]."""
        ids = ids.t()
        positions = torch.arange(ids.shape[0], device=ids.device)
        return self.dropout(self.tokens(ids) + self.positions(positions)[:, None])


class GPTBlock(nn.Module):
    """megatron-core's TransformerLayer ``number`` (from 1) with a causal mask, on [sequence, batch, hidden]."""

    def __init__(self, shape: GPTShape, number: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        _prepare_megatron()
        with _seeded(seed):
            self.layer = build_module(
                get_gpt_layer_local_spec(),
                config=transformer_config(shape, dtype),
                layer_number=number,
                pg_collection=_alone(),
            )
            self.layer.to(dtype)  # the local spec's norms ignore params_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return activations of the same shape; no token attends to later ones."""
        length = x.shape[0]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=x.device).triu(1)  # True: must not attend
        return self.layer(x, attention_mask=mask)[0]


class GPTNorm(nn.Module):
    """The final norm before a tied head, on activations [sequence, batch, hidden]."""

    def __init__(self, shape: GPTShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden, eps=transformer_config(shape, dtype).layernorm_epsilon, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return normalised activations [sequence, batch, hidden]."""
        return self.norm(x)


def tied_logits(embedding: GPTEmbedding, x: Tensor) -> Tensor:
    """Return logits [sequence, batch, vocabulary] of activations [sequence, batch, hidden] by the embedding's weights.
    The last stage has a copy of the whole embedding, with its unused positions, as in Megatron-DeepSpeed.
    """
    return F.linear(x, embedding.tokens.weight)


class GPTHead(nn.Module):
    """The final norm and an untied output layer: activations [sequence, batch, hidden] to logits."""

    def __init__(self, shape: GPTShape, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        with _seeded(seed):
            config = transformer_config(shape, dtype)
            self.norm = nn.LayerNorm(shape.hidden, eps=config.layernorm_epsilon)
            self.output = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
            config.init_method(self.output.weight)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [sequence, batch, vocabulary] of activations [sequence, batch, hidden]."""
        return self.output(self.norm(x))


def follow_default_generator() -> None:
    """Make megatron-core draw dropout masks from torch's default generator of the device, CPU or CUDA.

    Random numbers of a micro-batch are keyed by seeding that generator before F. Megatron's own tracker has private
    streams that continue per worker; its "inference tracker" has none. This is right for tensor-parallel size 1, where
    all streams are alike.
    """
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def _prepare_megatron() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "initialise torch.distributed (deepspeed.init_distributed()) before the GPT's layers are built"
        )
    megatron_cpu.apply()
    follow_default_generator()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # attention asks for it; initialize_model_parallel would make it
        parallel_state._set_global_memory_buffer()


class GroupOfOne:
    """A group of one member, with the methods that megatron-core calls if there is nobody to talk to."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _alone() -> ProcessGroupCollection:
    return ProcessGroupCollection(tp=GroupOfOne(), pp=GroupOfOne(), cp=GroupOfOne())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Run with the CPU's default generator at ``seed``, then restore it: weights are drawn on the CPU."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def transformer_config(shape: GPTShape, dtype: torch.dtype) -> TransformerConfig:
    """Return one stage's config: with a pipeline size other than 1 the layers would add an offset to their number."""
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=True,
        cuda_graph_scope=[],  # the default "full" becomes this, after a warning
        # every fusion needs CUDA or a compiler
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
