"""Split backward equals fused backward bit for bit, and says what it does not split."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recycle_plugin.runtime.stage.converters import CONVERTERS, Converter, register_converter
from recycle_plugin.runtime.stage.split_backward import DeferredWeights
from tests.support.split_backward import KINDS, Checkpointed, activations, block, in_i


def ids(*shape: int, count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(0, 11, shape, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_bitwise_under_every_kind_of_checkpointing(assert_bitwise, kind):
    torch.manual_seed(0)
    assert_bitwise(nn.Sequential(*(Checkpointed(block(), kind) for _ in range(2))), activations(5, 3, 16))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("shape", ((16,), (1, 16), (6, 16), (5, 3, 16), (2, 3, 4, 16)))
def test_bitwise_linear(assert_bitwise, shape, bias, dtype):
    assert_bitwise(nn.Linear(16, 12, bias=bias, dtype=dtype), activations(*shape, dtype=dtype))


@settings(max_examples=40)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_bitwise_linear_whatever_the_memory_layout(inner, outer, rows, batch, bias, input_order, gradient_order):
    """Layouts steer which GEMM and which sum torch runs; the split halves have to follow."""
    orders = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))

    def laid_out(seed: int, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        inverse = [order.index(axis) for axis in range(3)]
        return values.permute(order).contiguous().permute(inverse)

    torch.manual_seed(1)
    layer = nn.Linear(inner, outer, bias=bias, dtype=torch.float64)
    results = []
    for split in (False, True):
        model = copy.deepcopy(layer)
        x = laid_out(2, (rows, batch, inner), orders[input_order]).requires_grad_()
        gradient = laid_out(3, (rows, batch, outer), orders[gradient_order])
        if split:
            in_i(DeferredWeights(model), lambda: model(x).backward(gradient)).run()
        else:
            model(x).backward(gradient)
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(stock, mine) for stock, mine in zip(*results))


def test_a_parameter_shared_with_a_fused_layer_stays_fused(assert_bitwise):
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16, bias=False), nn.Linear(16, 16))
    model[1].bias = model[0].bias  # fuses 0 ...
    model[2].weight = model[0].weight  # ... which fuses 2
    deferred = DeferredWeights(copy.deepcopy(model))
    assert deferred.converted == ("3",)
    assert set(deferred.fused) == {"0", "1", "2"}
    assert_bitwise(model, activations(5, 16))


def test_frozen_parameters_get_no_gradient(assert_bitwise, gradients):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    assert_bitwise(model, activations(5, 3, 16))
    frozen = model[0]
    DeferredWeights(frozen)
    assert not frozen(torch.ones(1, 16)).requires_grad, "nothing to train, nothing in the graph"
    del frozen.forward
    split = gradients(model, activations(5, 3, 16), "hold")[1]
    assert {name for name, gradient in split.items() if gradient is None} == {
        "0.weight",
        "0.bias",
        "1.weight",
        "2.bias",
    }


def test_i_delivers_no_weight_gradient_and_w_all():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
    deferred, (x, *_) = DeferredWeights(model), activations(5, 16)
    pending = in_i(deferred, lambda: model(x).sum().backward())
    assert x.grad is not None and all(p.grad is None for p in model.parameters())
    assert len(pending) == 2
    # x, hidden, the gradients of both outputs (the last one is an expanded scalar)
    assert pending.nbytes == 4 * (5 * 16 + 5 * 16 + 5 * 16 + 1)
    pending.run()
    assert all(p.grad is not None for p in model.parameters())
    assert len(pending) == 0 and pending.nbytes == 0
    before = [p.grad.clone() for p in model.parameters()]
    pending.run()
    assert all(torch.equal(old, p.grad) for old, p in zip(before, model.parameters())), "a second W must do nothing"


def test_hooks_fire_once_in_w():
    model, seen, nodes = nn.Linear(16, 16), [], []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: seen.append(("tensor", name, g is not None)))
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append(("accumulated", name, p.grad is not None))
        )
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # what DeepSpeed hooks
        node.register_hook(lambda *_, name=name: seen.append(("node", name, True)))
        nodes.append(node)
    deferred, (x, *_) = DeferredWeights(model), activations(5, 16)
    pending = in_i(deferred, lambda: model(x).sum().backward())
    assert seen == []
    pending.run()
    assert sorted(seen) == sorted(
        (kind, name, True) for kind in ("tensor", "accumulated", "node") for name in ("weight", "bias")
    )
    seen.clear()
    model(x).sum().backward()
    assert len(seen) == 6, "each hook fires once where nothing is split, too"


def test_engines_in_one_process_share_nothing():
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    deferred, other = DeferredWeights(first), DeferredWeights(second)
    (x, *_) = activations(5, 16)
    with other.hold() as unused:
        pending = in_i(deferred, lambda: first(x).sum().backward())
    assert (len(pending), len(unused)) == (1, 0)
    pending = in_i(deferred, lambda: second(first(x)).sum().backward())
    assert len(pending) == 1 and second.weight.grad is not None and first.weight.grad is None


@pytest.mark.parametrize(
    "clone", (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))), ids=("deepcopy", "pickle")
)
def test_a_copied_model_is_cut_loose(clone):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    deferred, (x, *_) = DeferredWeights(model), activations(5, 16)
    copied = clone(model)
    pending = in_i(deferred, lambda: copied(x).sum().backward())
    assert len(pending) == 0 and all(p.grad is not None for p in copied.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_restore_and_names():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Embedding(4, 16, max_norm=1.0), nn.Dropout())
    state, kinds = list(model.state_dict()), [type(part) for part in model]
    deferred = DeferredWeights(model)
    assert deferred.converted == ("0",) and deferred.fused == ("1", "2")
    assert list(model.state_dict()) == state and [type(part) for part in model] == kinds
    with pytest.raises(ValueError, match="0 is converted already"):
        DeferredWeights(model)
    deferred.restore()
    deferred.restore()
    assert "forward" not in vars(model[0])
    assert set(deferred.fused) == {"0", "1", "2"} and deferred.converted == ()
    pending = in_i(deferred, lambda: model[0](activations(5, 16)[0]).sum().backward())
    assert len(pending) == 0 and model[0].weight.grad is not None


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_is_not_known_stays_fused():
    replaced = nn.Linear(16, 16)
    replaced.forward = lambda x: x * replaced.weight[0]
    model = nn.Sequential(Doubled(16, 16), replaced, torch.nn.utils.weight_norm(nn.Linear(16, 16)))
    assert DeferredWeights(model).converted == ()
    for embedding in (
        nn.Embedding(4, 2, max_norm=1.0),
        nn.Embedding(4, 2, sparse=True),
    ):
        assert DeferredWeights(embedding).converted == ()


def test_autocast_and_no_grad_run_the_stock_layer():
    model = nn.Linear(16, 16)
    deferred, (x, *_) = DeferredWeights(model), activations(5, 16)
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pending = in_i(deferred, lambda: model(x).float().sum().backward())
        assert model(x).dtype is torch.bfloat16
    assert len(pending) == 0 and model.weight.grad is not None, "nothing to put off"


def test_errors_say_what_went_wrong():
    model = nn.Sequential(nn.Linear(16, 16))
    deferred, (x, *_) = DeferredWeights(model), activations(5, 16)
    with pytest.raises(RuntimeError, match="hold\\(\\) inside hold\\(\\)"), deferred.hold(), deferred.hold():
        pass
    pending = in_i(deferred, lambda: model(x).sum().backward())  # the failed one has been left properly
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between I and W"):
        pending.run()


def test_a_step_between_f_and_i_is_an_error_and_no_number():
    for deferred in (False, True):
        model = nn.Linear(16, 16)
        with DeferredWeights(model).forward() if deferred else nullcontext():
            output = model(activations(5, 16)[0])
        with torch.no_grad():
            model.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_a_backward_that_fails_leaves_nothing_behind():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("on purpose")

    model = nn.Linear(16, 16)
    deferred, (x, *_) = DeferredWeights(model), activations(5, 16)
    with pytest.raises(ArithmeticError):
        in_i(deferred, lambda: model(Fails.apply(x)).sum().backward())
    assert len(in_i(deferred, lambda: model(x).sum().backward())) == 1 and model.weight.grad is None


class Gate(nn.Module):
    """``x * exp(gain)``: a layer of somebody else's, whose weight gradient reads the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0, 1, 16))

    def forward(self, x):
        return x * self.gain.exp()


@pytest.fixture
def gate_converter(monkeypatch):
    monkeypatch.setitem(CONVERTERS, Gate, None)  # taken out again at the end
    register_converter(Gate, Converter())


def test_a_registered_layer_type_is_split(gate_converter, assert_bitwise):
    model = nn.Sequential(nn.Linear(16, 16), Gate())
    assert DeferredWeights(copy.deepcopy(model)).fused == ()
    assert_bitwise(model, activations(5, 16))


def test_w_builds_no_graph_even_where_an_operator_reads_its_weight(gate_converter):
    model, attached = Gate(), []
    model.gain.register_hook(lambda gradient: attached.append(gradient.requires_grad))
    in_i(DeferredWeights(model), lambda: model(activations(5, 16)[0]).sum().backward()).run()
    assert attached == [False]
