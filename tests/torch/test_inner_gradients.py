"""Layers that differentiate in their forward, and weights that are used past their layers: which are fused, what is
refused, and hooks that the differential tester (tests/support/grammar) does not know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.stage.ports import StageModel
from recycle_plugin.runtime.stage.randomness import key as random_key
from recycle_plugin.runtime.stage.randomness import keyed
from recycle_plugin.runtime.stage.split_backward import DeferredWeights
from recycle_plugin.runtime.stage.stage import Stage
from tests.support.stored_stage import StoredStage

WIDTH, MICRO_BATCHES = 8, 3


class Layer(nn.Module):
    """``function(layer, x)``, with two Linears."""

    def __init__(self, function: Callable[[Layer, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.l, self.other, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def energy(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(layer.l(x)).pow(2).sum()


def gradient_of_energy(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(energy(layer, x), x)
    return layer.l(x) + gradient


def penalty(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(energy(layer, x), x, create_graph=True)
    return layer.other(x) * (1 + gradient.pow(2).mean())


def unused_is_none(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    (weight,) = torch.autograd.grad(energy(layer, x), layer.l.weight, allow_unused=True)
    return layer.other(x) if weight is None else layer.other(x) + x @ weight


def by_an_edge(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    edge = torch.autograd.graph.get_gradient_edge(layer.l.weight)
    (weight,) = torch.autograd.grad(energy(layer, x), [edge], allow_unused=True)
    return layer.other(x) if weight is None else layer.other(x) + x @ weight


def caught(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    try:
        (weight,) = torch.autograd.grad(energy(layer, x), layer.l.weight)
    except RuntimeError:
        return layer.other(x)
    return layer.other(x) + x @ weight


def derived_weights(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    made = {name: parameter * 2 for name, parameter in layer.l.named_parameters()}
    return torch.func.functional_call(layer.l, made, x) + layer.other(x)


def sometimes(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return penalty(layer, x) if x.sum() < 0 else layer.l(x)


def score(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """As under reentrant checkpointing, which runs the forward without grad."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        return layer.other(x) + torch.autograd.grad(energy(layer, x), x, create_graph=True)[0]


def recomputed_reentrantly(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda given: score(layer, given), x, use_reentrant=True)


FUSED = {
    penalty: ("l",),
    unused_is_none: ("l",),
    by_an_edge: ("l",),
    caught: ("l",),
    sometimes: ("l",),
    recomputed_reentrantly: ("l",),
    gradient_of_energy: (),
    derived_weights: (),
}


def data(seed: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


class Trained:
    """``layer`` as the only stage, for a step of MICRO_BATCHES; ``ops``: how each is run after its forward."""

    def __init__(self, layer: nn.Module, split: bool, ops: str) -> None:
        self.told: list[tuple[str, ...]] = []
        self.layer, self.ops = layer, ops
        model = StageModel(layer, nn.functional.mse_loss, MICRO_BATCHES, True, True, CPU)
        deferred = DeferredWeights(layer) if split else None
        stage = Stage(
            model,
            deferred,
            lambda micro_batch, step, half: keyed(random_key(1, step, micro_batch, 0, half), CPU),
            fused=self.told.append,
        )
        self.stage = StoredStage(stage)

    def run(self) -> list[float]:
        keys = [(1, MicroBatch(0, index)) for index in range(MICRO_BATCHES)]
        for index, key in enumerate(keys):
            self.stage.load(key, (data(index), data(100 + index)))
            self.stage.forward(key)
            self.stage.backward(key) if self.ops == "B" else self.stage.backward_input(key)
            if self.ops == "IW":
                self.stage.backward_weight(key)
        return [self.stage.losses[key].item() for key in keys]

    def all_i_before_w(self, begins: Callable[[int], object] = lambda index: None) -> None:
        """As a pipeline does.  ``begins(index)``: a micro-batch does."""
        keys = [(1, MicroBatch(0, index)) for index in range(MICRO_BATCHES)]
        for index, key in enumerate(keys):
            begins(index)
            self.stage.load(key, (data(index), data(100 + index)))
            self.stage.forward(key)
            self.stage.backward_input(key)
        for key in keys:
            self.stage.backward_weight(key)

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self.layer.parameters()]


def stock(layer: nn.Module) -> tuple[list[float], list[torch.Tensor | None]]:
    losses = []
    for index in range(MICRO_BATCHES):
        with keyed(random_key(1, 1, MicroBatch(0, index), 0), CPU):
            loss = nn.functional.mse_loss(layer(data(index)), data(100 + index))
        (loss / MICRO_BATCHES).backward()
        losses.append(loss.item())
    return losses, [parameter.grad for parameter in layer.parameters()]


def same(mine: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> bool:
    return all(one is other is None or torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


class Grad(nn.Module):
    """The data of a first stage requires no gradient: these layers want one that does.  It is changed in place, too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.add_(0.1).clone().requires_grad_())


def built(function: Callable) -> nn.Module:
    torch.manual_seed(0)
    return Grad(Layer(function))


@pytest.mark.parametrize("split, ops", ((True, "IW"), (True, "B"), (False, "B")))
@pytest.mark.parametrize("function", FUSED, ids=lambda function: function.__name__)
def test_what_a_forward_differentiates_is_as_with_stock(function, split, ops):
    trained = Trained(built(function), split, ops)
    losses, gradients = stock(built(function))
    assert trained.run() == losses
    assert same(trained.gradients, gradients)
    assert trained.told == [tuple(f"inner.{name}" for name in FUSED[function])] * bool(split and FUSED[function])


@pytest.mark.parametrize("split", (True, False))
def test_a_backward_in_a_forward_is_refused(split):
    def adds(layer, x):
        energy(layer, x).backward()
        return layer.l(x)

    def hides(layer, x):
        try:
            energy(layer, x).backward()
        except Exception:
            pass
        return layer.l(x)

    for function in (adds, hides):
        with pytest.raises(RecycleError, match=r"calls backward\(\) in its forward.*use torch.autograd.grad"):
            Trained(built(function), split, "B").run()


def test_a_backward_by_inputs_that_are_no_parameters_is_stocks():
    def by_inputs(layer, x):
        given = x.detach().requires_grad_()
        energy(layer, given).backward(inputs=[given])
        return layer.l(x) + given.grad

    trained = Trained(built(by_inputs), True, "IW")
    losses, gradients = stock(built(by_inputs))
    assert trained.run() == losses and same(trained.gradients, gradients) and trained.told == []


def test_a_layer_that_raises_raises():
    def fails(layer, x):
        torch.autograd.grad(energy(layer, x), x)
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        Trained(built(fails), True, "IW").run()
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward, "nobody listens any more"


def recomputing(backward: Callable) -> type[torch.autograd.Function]:
    """As reversible layers are: nothing of the forward is kept, and ``backward(layer, x, gradient)`` computes it once
    more for the gradient of ``x``.
    """

    class Recomputing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer):
            ctx.save_for_backward(x)
            ctx.layer = layer
            return layer(x)

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                return backward(ctx.layer, ctx.saved_tensors[0].detach().requires_grad_(), gradient), None

    return Recomputing


def test_a_recomputation_that_asks_for_more_than_its_forward_is_an_error():
    """Never a number: what it would be fused for is not there any more."""

    def shy(layer, x):
        def inner(given):
            out = layer.other(given)
            if torch.is_grad_enabled():
                (weight,) = torch.autograd.grad(energy(layer, given), layer.l.weight, allow_unused=True)
                out = out + (0 if weight is None else given @ weight)
            return out

        return checkpoint(inner, x, use_reentrant=True)

    custom = recomputing(lambda layer, x, gradient: torch.autograd.grad(layer(x), [x, layer.weight], gradient)[0])
    for function in (shy, lambda layer, x: custom.apply(x, layer.l)):
        with pytest.raises(
            RecycleError, match="by parameters, .* whose backward is split.* set recycle.split_backward to false"
        ):
            Trained(built(function), True, "IW").run()


def test_a_custom_backward_that_accumulates_is_split():
    """As reversible networks do: the weight gradients of what a backward computes once more are its own."""

    def accumulates(layer, x, gradient):
        torch.autograd.backward(layer(x), gradient)
        return x.grad

    reversible = recomputing(accumulates)
    trained = Trained(built(lambda layer, x: reversible.apply(x, layer.l)), True, "IW")
    losses, gradients = stock(built(lambda layer, x: reversible.apply(x, layer.l)))
    assert trained.run() == losses and same(trained.gradients, gradients)
    assert any(gradient is not None for gradient in gradients)


def test_a_graph_that_is_kept_past_its_forward_gives_no_number():
    kept: list[torch.Tensor] = []

    def keeps(layer, x):
        kept.append(layer.l(x))
        return layer.other(x)

    Trained(built(keeps), True, "IW").run()
    with pytest.raises(RecycleError, match="detach tensors kept from a forward"):
        kept[0].sum().backward()


# --- weights used past their layers --------------------------------------------------------------------


def twice(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.l(x) + F.linear(x, layer.l.weight.t())


@pytest.mark.parametrize("past", (0, 1, 2))
def test_micro_batches_that_use_a_weight_past_its_layer_are_added_in_their_turn(past):
    running = []

    def either(layer, x):
        return F.linear(x, layer.l.weight) if running[-1] == past else layer.l(x)

    split, fused = (Trained(built(either), split, "") for split in (True, False))
    for trained in (split, fused):
        trained.all_i_before_w(running.append)
    assert same(split.gradients, fused.gradients)


def hooked_by_any(layer: nn.Module, seen: list) -> None:
    torch.autograd.graph.register_multi_grad_hook(list(layer.parameters()), seen.append, mode="any")


def hooked_by_what_is_left_elsewhere(layer: nn.Module, seen: list) -> None:
    """The weight's gradient is divided by the norm of this micro-batch's gradient of the layer's output."""
    layer.inner.l.register_forward_hook(
        lambda module, given, made: made.register_hook(lambda gradient: seen.append(gradient.norm())) and None
    )
    layer.inner.l.weight.register_hook(lambda gradient: gradient / (seen[-1] + 1e-6))


def hooked_until_the_backward(layer: nn.Module, seen: list) -> None:
    """The hook is removed by another one, before it would have its turn."""
    handle = layer.inner.l.weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 3)
    layer.inner.l.register_forward_hook(
        lambda module, given, made: made.register_hook(lambda gradient: handle.remove()) and None
    )


@pytest.mark.parametrize(
    "function",
    (
        twice,
        gradient_of_energy,
        lambda layer, x: checkpoint(lambda given: torch.tanh(F.linear(given, layer.l.weight)), x) + layer.l(x),
    ),
)
@pytest.mark.parametrize("hook", (hooked_by_any, hooked_by_what_is_left_elsewhere, hooked_until_the_backward))
@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
def test_hooks_of_all_kinds_are_called_as_with_stock(function, hook):
    layer, other, mine, theirs = built(function), built(function), [], []
    hook(layer, mine), hook(other, theirs)
    trained, (_, gradients) = Trained(layer, True, ""), stock(other)
    trained.all_i_before_w()
    # in the first forward, which is run twice
    again = function is gradient_of_energy and hook is hooked_by_what_is_left_elsewhere
    assert same(trained.gradients, gradients) and len(mine) == len(theirs) + again


def test_a_weight_that_is_frozen_for_one_use():
    def frozen_once(layer, x):
        layer.other.weight.requires_grad_(False)
        made = layer.other(layer.l(x))
        layer.other.weight.requires_grad_(True)
        return made

    trained = Trained(built(frozen_once), True, "IW")
    losses, gradients = stock(built(frozen_once))
    assert trained.run() == losses and same(trained.gradients, gradients)
    assert any(gradient is None for gradient in gradients)


def test_a_bare_input_gradient_calls_no_hook():
    layer, seen = built(twice), []
    for parameter in layer.parameters():
        parameter.register_hook(seen.append)
    trained = Trained(layer, True, "IW")
    key = (1, MicroBatch(0, 0))
    trained.stage.load(key, (data(0), data(100)))
    trained.stage.forward(key)
    trained.stage.backward_input_boundary_only(key)
    assert seen == [] and all(gradient is None for gradient in trained.gradients)


def test_three_uses_of_both_kinds_differ_by_the_order_of_a_sum():
    """The one exception from bit for bit: what I has made is one part of W's sum, wherever torch would have added
    it.
    """

    def three(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return layer.l(torch.tanh(F.linear(torch.tanh(layer.l(x)), layer.l.weight)))

    trained = Trained(built(three), True, "IW")
    losses, gradients = stock(built(three))
    assert trained.run() == losses
    for mine, theirs in zip(trained.gradients, gradients):
        assert mine is theirs is None or torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_copy_of_the_model_between_steps_is_stock():
    layer = built(gradient_of_energy)
    trained = Trained(layer, True, "IW")
    trained.run()
    copied = copy.deepcopy(layer)
    for parameter in copied.parameters():
        parameter.grad = None
    weight = torch.autograd.grad(copied(data(0)).sum(), copied.inner.l.weight)[0]
    mine = torch.autograd.grad(layer(data(0)).sum(), layer.inner.l.weight)[0]
    assert torch.equal(weight, mine)
