"""An analytic A100, for use without a GPU to measure: costs of GPT layers from counted operations and bytes.

The title of every profile made here says ANALYTIC. Assumptions, fixed before any comparison, not tuned to one:

* A100 SXM, 312 TFLOP/s dense bf16, 2.0e12 bytes/s of memory (NVIDIA's data sheet). Matrix products achieve 50% of the
  peak, which allows for everything else of a layer; memory traffic of the optimizer achieves 80%.
* A layer of hidden size h has 12 h^2 weights in products; a product of n weights on t tokens costs 2 n t in F, in I
  and in W each. Scores and values cost 4 s h per token in F (the causal half is not skipped), twice that in I, none
  in W.
* Activation checkpointing runs F again inside I. A fused backward costs I + W: whether W repeats nothing is ours to
  measure.
* Held by a layer for each token, without checkpointing: 34 h bytes (Korthikanti et al. 2022, eq. 2, with scores
  recomputed as FlashAttention does); with it 2 h bytes. Pending for W: inputs and output gradients of the four
  products, 32 h bytes.
* The head multiplies by the vocabulary (V h weights, not tied) and holds 6 V bytes a token (bf16 and fp32 logits);
  the embedding reads and writes memory only.
* Adam in mixed precision moves 30 bytes a parameter. Gradients are summed in fp32 by a ring over 80 Gbit/s (10 GB/s,
  90% achieved, 30 us; each GPU has its own line), after the last W of the stage and not hidden behind compute;
  boundary tensors are bf16 on the same line. Inside a host NVLink, 300 GB/s each way, 80% achieved, 5 us.
* Tensor parallelism t: products and optimizer divide by t; each layer adds two all-reduces of the boundary tensor
  over NVLink to F and two to I (and F's again to I under checkpointing).
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.lab.planner.profile import LayerProfile, Profile, Wire, ring_us

WRITTEN = "2026-11-21"
DEVICE = "A100 80 GB, 80 Gbit/s between hosts"
FLOPS, PRODUCT_SHARE = 312e12, 0.5  # of the device per second, and the share of them that is achieved
MEMORY_BYTES_PER_S, MEMORY_SHARE = 2.0e12, 0.8  # likewise
INSIDE, ACROSS = Wire(5, 0.8 * 300_000), Wire(30, 0.9 * 10_000)


@dataclass(frozen=True)
class GptShape:
    """The shape of a GPT: sizes as in configs/model; ``tensor``: GPUs of a tensor-parallel group."""

    name: str
    layers: int
    hidden: int
    tensor: int = 1
    sequence: int = 2048
    vocabulary: int = 50304

    @property
    def parameters(self) -> int:
        """The number of parameters as ``lab.training.gpt.GPTShape`` counts them, with an untied head."""
        h = self.hidden
        return self.layers * (12 * h * h + 13 * h) + (2 * self.vocabulary + self.sequence) * h + 2 * h


SHAPES = {
    shape.name: shape
    for shape in (
        GptShape("gpt3_medium", 24, 1024),
        GptShape("gpt3_3_35b", 28, 3072),
        GptShape("gpt3_6_7b", 32, 4096),
        GptShape("gpt_18_4b", 40, 6144, tensor=8),
        GptShape("gpt_39_1b", 48, 8192, tensor=8),
        GptShape("gpt_76_1b", 60, 10240, tensor=8),
        GptShape("gpt_145_6b", 80, 12288, tensor=8),
    )
}
"""Shapes: of configs/model; the last four of the Megatron SC'21 family, with a tensor parallelism of our choice."""


def preset(name: str, micro_batch: int = 1) -> Profile:
    """Return an analytic profile by name, ``<shape>`` or with checkpointing ``<shape>-ckpt``. Raises ValueError."""
    shape, _, saved = name.partition("-")
    if shape not in SHAPES or saved not in ("", "ckpt"):
        raise ValueError(
            f"--preset {name}: one of {', '.join(SHAPES)}, each also with -ckpt for activation checkpointing"
        )
    return profile(SHAPES[shape], micro_batch, checkpointing=saved == "ckpt")


def profile(shape: GptShape, micro_batch: int = 1, checkpointing: bool = False) -> Profile:
    """Return the analytic profile of ``shape`` for micro-batches of ``micro_batch`` sequences."""
    tokens, h, v = micro_batch * shape.sequence, shape.hidden, shape.vocabulary
    boundary = 2 * tokens * h
    return Profile(
        name=f"{shape.name} ({shape.parameters / 1e9:.3g}B parameters)",
        source=f"ANALYTIC: {DEVICE}, {WRITTEN}",
        micro_batch=micro_batch,
        checkpointing=checkpointing,
        layers=shape.layers,
        first=_embedding(tokens, (v + shape.sequence) * h, h, shape.tensor),
        layer=_layer(shape, tokens, boundary, checkpointing),
        last=_head(tokens, v * h, v, h, shape.tensor),
        boundary_bytes=boundary,
        across=ACROSS,
        gpus_per_worker=shape.tensor,
    )


def _layer(shape: GptShape, tokens: int, boundary: int, checkpointing: bool) -> LayerProfile:
    h, t = shape.hidden, shape.tensor
    product = _product_us(2 * 12 * h * h * tokens / t)
    scores = _product_us(4 * shape.sequence * h * tokens / t)
    joined = 2 * ring_us(INSIDE, boundary, t)
    forward = product + scores + joined
    again = forward if checkpointing else 0.0
    gradient = product + 2 * scores + joined + again
    held = 2 * h * tokens if checkpointing else 34 * h * tokens // t
    parameters = 12 * h * h + 13 * h
    return LayerProfile(
        forward,
        gradient,
        product,
        _adam(parameters, t),
        parameters,
        held,
        32 * h * tokens // t,
    )


def _embedding(tokens: int, parameters: int, hidden: int, tensor: int) -> LayerProfile:
    """Return the profile of an embedding: F reads, adds and writes rows; W adds gradient rows into the table."""
    moved = _memory_us(6 * hidden * tokens)
    return LayerProfile(moved, 0.0, 2 * moved, _adam(parameters, tensor), parameters, 0, 2 * hidden * tokens)


def _head(tokens: int, parameters: int, vocabulary: int, hidden: int, tensor: int) -> LayerProfile:
    product = _product_us(2 * parameters * tokens / tensor)
    loss = _memory_us(10 * vocabulary * tokens / tensor)
    held, pending = (2 * hidden + 6 * vocabulary // tensor) * tokens, (2 * hidden + 2 * vocabulary // tensor) * tokens
    return LayerProfile(
        product + loss,
        product + loss,
        product,
        _adam(parameters, tensor),
        parameters,
        held,
        pending,
    )


def _adam(parameters: int, tensor: int) -> float:
    return _memory_us(30 * parameters / tensor)


def _product_us(operations: float) -> float:
    """Return the microseconds of ``operations`` floating-point operations in matrix products."""
    return 1e6 * operations / (FLOPS * PRODUCT_SHARE)


def _memory_us(size: float) -> float:
    """Return the microseconds to read or write ``size`` bytes of memory."""
    return 1e6 * size / (MEMORY_BYTES_PER_S * MEMORY_SHARE)
