"""The GPT of megatron-core layers: parameters, seeds, split backward of every layer type, training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

pytest.importorskip("megatron.core")

from recycle_plugin.lab.training import gpt
from recycle_plugin.lab.training.gpt import GPTShape, gpt_layers, gpt_loss
from recycle_plugin.runtime.stage.split_backward import DeferredWeights
from tests.support.grammar.surroundings import Changed, Noisy, coarse, doubled, patched, straight_through, weight_by

pytestmark = pytest.mark.usefixtures("process_group")
SHAPE = GPTShape(layers=2, hidden=32, heads=4, sequence=16, vocabulary=64, dropout=0.1)


def build(shape: GPTShape = SHAPE, **kwargs) -> nn.Sequential:
    return nn.Sequential(*(spec.build() for spec in gpt_layers(shape, **kwargs)))


def ids(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, SHAPE.vocabulary, (2, SHAPE.sequence), generator=generator) for _ in range(count)]


def hidden(dtype=torch.float32, count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(16, 2, 32, generator=generator, dtype=dtype).requires_grad_() for _ in range(count)]


class NonReentrant(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Reentrant(NonReentrant):
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)


class DeepSpeedReentrant(NonReentrant):
    def forward(self, x):
        from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint as deepspeed_checkpoint

        return deepspeed_checkpoint(self.inner, x)


class DeepSpeedNonReentrant(NonReentrant):
    def forward(self, x):
        from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint

        return non_reentrant_checkpoint(self.inner, x)


def test_weights_are_drawn_in_fp32_in_every_precision(monkeypatch):
    drawn, stock = set(), torch.Tensor.normal_

    def draw(tensor, *given, **named):  # older releases of torch draw other numbers in bf16, and others again in fp16
        drawn.add(tensor.dtype)
        return stock(tensor, *given, **named)

    monkeypatch.setattr(torch.Tensor, "normal_", draw)
    half, whole = build(params_dtype=torch.bfloat16), build()
    assert drawn == {torch.float32}
    for one, other in zip(half.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other.bfloat16())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("wrap", (nn.Sequential, NonReentrant, Reentrant, DeepSpeedReentrant, DeepSpeedNonReentrant))
def test_split_backward_of_megatrons_layer_is_bitwise_with_dropout_on(assert_bitwise, wrap, dtype):
    block = build(params_dtype=dtype)[1]
    assert_bitwise(wrap(block), hidden(dtype))


def test_split_backward_of_the_whole_gpt_is_bitwise(assert_bitwise):
    assert_bitwise(build(), ids())


def test_what_stays_fused_in_a_gpt_are_its_norms():
    deferred = DeferredWeights(build())
    assert {name.split(".")[-1] for name in deferred.converted} == {
        "tokens",
        "positions",
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
        "output",
    }
    assert {name.split(".")[-1] for name in deferred.fused} == {"input_layernorm", "pre_mlp_layernorm", "norm"}


def test_megatrons_own_embedding_and_head_are_split_too(assert_bitwise):
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    config = gpt.transformer_config(SHAPE, torch.float32)
    gpt.follow_default_generator()

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            group = gpt.GroupOfOne()
            self.embedding = LanguageModelEmbedding(config, 64, 16, tp_group=group)
            self.output = ColumnParallelLinear(
                32, 64, config=config, init_method=config.init_method, bias=True, tp_group=group
            )

        def forward(self, x):
            return self.output(self.embedding(x, torch.arange(16).expand_as(x)))[0]

    model = Ends()
    assert_bitwise(model, ids())
    assert DeferredWeights(model).fused == ()


def test_tensor_parallel_sums_the_inputs_gradient_in_i_only(monkeypatch):
    from recycle_plugin.adapters.megatron.layers import ParallelLinear

    calls = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: calls.append(group))
    x, weight = torch.randn(2, 3, requires_grad=True), nn.Parameter(torch.randn(4, 3))
    output = ParallelLinear.apply(x, weight, None, "tensor-parallel group")
    gradient = torch.randn(2, 4)
    torch.autograd.backward((output,), (gradient,), retain_graph=True, inputs=[weight])
    assert calls == [] and x.grad is None and weight.grad.shape == (4, 3)
    (made,) = torch.autograd.grad((output,), (x.requires_grad_(),), (gradient,))
    assert made.shape == (2, 3) and calls == ["tensor-parallel group"]


@pytest.mark.parametrize("option", ("gradient_accumulation_fusion", "sequence_parallel"))
def test_parallel_linears_with_other_backwards_stay_fused(option):
    from recycle_plugin.adapters.megatron.layers import _call

    options = {"gradient_accumulation_fusion": False, "allreduce_dgrad": False, "sequence_parallel": False}
    call = {"input": torch.randn(2, 3), "weight": nn.Parameter(torch.randn(4, 3)), "bias": None}
    assert _call(nn.Identity(), **call, **options) is not None
    assert _call(nn.Identity(), **call, **options | {option: True}) is None


class Within(nn.Module):
    """Calls ``inner`` inside of a context."""

    def __init__(self, inner: nn.Module, context) -> None:
        super().__init__()
        self.inner, self.context = inner, context

    def forward(self, x):
        with self.context():
            return self.inner(x)


def megatron_patched(name: str, make):
    from megatron.core.tensor_parallel import layers

    return lambda: patched(layers, name, make)


AROUND = {
    "a mode": lambda: Changed(weight_by(straight_through)),
    "a mode that doubles what comes out": lambda: Changed(lambda args: args, lambda made: made * 2),
    "saved tensors rounded": lambda: saved_tensors_hooks(coarse, lambda x: x),
    "a dispatch mode": Noisy,
    "its function patched": megatron_patched("linear_with_grad_accumulation_and_async_allreduce", doubled),
    "F.embedding patched": lambda: patched(nn.functional, "embedding", doubled),
}


@pytest.mark.parametrize("wrap", (nn.Sequential, NonReentrant))
@pytest.mark.parametrize("name", AROUND)
def test_what_stands_around_megatrons_layers_counts_as_in_stock(assert_bitwise, name, wrap):
    stages = build()
    assert_bitwise(Within(wrap(stages[1]), AROUND[name]), hidden())
    assert_bitwise(Within(stages[0], AROUND[name]), ids())


def test_no_parallel_layer_of_a_checkpointed_model_is_lost():
    counts = []
    for wrap in (nn.Sequential, NonReentrant, Reentrant, DeepSpeedReentrant, DeepSpeedNonReentrant):
        model = wrap(build()[1])
        deferred = DeferredWeights(model)
        with deferred.forward(), deferred.hold() as pending:
            model(hidden()[0]).sum().backward()
        counts.append(len(pending))
        pending.run()
    assert counts == [4] * 5


def test_every_dropout_mask_follows_the_callers_seed():
    """Attention's too: megatron's own tracker would draw it from a stream that counts per worker."""
    block = build()[1]
    (x, *_) = hidden()
    masks = []
    handle = block.layer.self_attention.core_attention.attention_dropout.register_forward_hook(
        lambda _module, _inputs, output: masks.append(output == 0)
    )
    outputs = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        outputs.append(block(x))
    handle.remove()
    assert torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])
    assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])


def test_layers_initialise_alike_whatever_was_drawn_before():
    torch.manual_seed(1)
    whole = build().state_dict()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    for number, spec in reversed(list(enumerate(gpt_layers(SHAPE)))):
        for name, value in spec.build().state_dict().items():
            assert value is None or torch.equal(value, whole[f"{number}.{name}"]), f"layer {number}, {name}"
    assert torch.equal(before, torch.get_rng_state()), "building must not move the caller's generator"
    qkv = "layer.self_attention.linear_qkv.weight"
    assert not torch.equal(whole[f"1.{qkv}"], whole[f"2.{qkv}"])
    assert not torch.equal(whole["0.tokens.weight"], build(seed=7).state_dict()["0.tokens.weight"])


@pytest.mark.parametrize("shape", (SHAPE, GPTShape(3, 24, 2, 8), GPTShape(1, 8, 1, 5, vocabulary=11)))
def test_parameter_count(shape):
    assert shape.parameters() == sum(p.numel() for p in build(shape).parameters())


def test_a_tied_head_adds_no_parameters():
    shape = replace(SHAPE, tied=True)
    *layers, head = gpt_layers(shape)
    assert shape.parameters() == sum(p.numel() for spec in layers for p in spec.build().parameters())
    x, embedding = torch.randn(5, 2, SHAPE.hidden), head.build()
    assert torch.equal(head.forward_fn(embedding, x), x @ embedding.tokens.weight.t()) and head.key == layers[0].key


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"heads": 5}, "model.hidden is 32: it has to be a multiple of model.heads, 5"),
        ({"layers": 0}, "model.layers is 0: it has to be a whole number, at least 1"),
        ({"hidden": 32.0}, "model.hidden is 32.0: it has to be a whole number"),
        ({"dropout": 1.0}, "model.dropout is 1.0: it has to be at least 0 and below 1"),
    ),
)
def test_a_bad_shape_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        GPTShape(**{"layers": 2, "hidden": 32, "heads": 4, "sequence": 16} | change)


def test_causal():
    model = build().eval()
    (x, *_) = ids()
    changed = x.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % SHAPE.vocabulary
    before, after = model(x), model(changed)
    assert torch.equal(before[:10], after[:10]) and not torch.equal(before[10:], after[10:])


def test_the_loss_reads_labels_by_position():
    logits = torch.full((3, 2, 5), -30.0)
    labels = torch.tensor([[0, 1, 2], [3, 4, 0]])
    for batch in range(2):
        for position in range(3):
            logits[position, batch, labels[batch, position]] = 30.0
    assert gpt_loss(logits, labels) < 1e-6
    assert gpt_loss(logits, labels.flip(0)) > 30
