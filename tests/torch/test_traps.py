"""The five traps of splitting backward: each goes wrong without its cure, here, and right with it.

The uncured variants are what one writes first; they stand here so that nobody simplifies the cure away.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recycle_plugin.runtime.stage.split_backward import DeferredWeights, PendingWeights


def batch(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (64, 48)), generator=torch.Generator().manual_seed(seed)).requires_grad_()


def both_halves(deferred: DeferredWeights, forward: Callable[[], torch.Tensor], gradient: torch.Tensor) -> None:
    with deferred.forward():
        output = forward()
    with deferred.hold() as pending:
        output.backward(gradient)
    pending.run()


def test_1_a_parameter_from_saved_tensors_is_an_alias_under_checkpointing():
    waiting = []

    class Uncured(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight)

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            waiting.append((weight, gradient.t().mm(x)))
            return gradient.mm(weight), None

    weight = nn.Parameter(torch.randn(48, 48))
    checkpoint(lambda x: Uncured.apply(x, weight), batch(0), use_reentrant=False).sum().backward()
    (((alias, gradient)),) = waiting
    alias.grad = gradient
    assert alias is not weight and weight.grad is None, "trap 1 is gone: saved_tensors gave back the Parameter"

    layer = nn.Linear(48, 48, bias=False)
    deferred = DeferredWeights(layer)
    both_halves(deferred, lambda: checkpoint(layer, batch(0), use_reentrant=False), torch.ones(64, 48))
    assert layer.weight.grad is not None


class Sentinel:
    """Dies with the autograd node that holds it."""


class Upstream(torch.autograd.Function):
    """A node that stands before a layer, as other layers of the stage do."""

    @staticmethod
    def forward(ctx, x, sentinel):
        ctx.sentinel = sentinel
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


def graph_outlives_i(run_i) -> bool:
    """Whether the graph before the layer is alive while only W is pending."""
    sentinel = Sentinel()
    alive = weakref.ref(sentinel)
    hidden = Upstream.apply(batch(0), sentinel)
    del sentinel
    pending = run_i(hidden)
    del hidden
    gc.collect()
    return alive() is not None and pending is not None


def test_2_an_attached_input_keeps_the_graph_behind_it_alive():
    waiting = []

    class Uncured(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            ctx.weight = weight
            return F.linear(x, weight)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            waiting.append(lambda: torch.autograd.backward([ctx.weight], [gradient.t().mm(x)]))
            return gradient.mm(ctx.weight), None

    weight = nn.Parameter(torch.randn(48, 48))

    def uncured(hidden):
        Uncured.apply(hidden, weight).sum().backward()
        return waiting

    layer = nn.Linear(48, 48)
    deferred = DeferredWeights(layer)

    def cured(hidden):
        with deferred.forward(), deferred.hold() as pending:
            layer(hidden).sum().backward()
        assert len(pending) == 1
        return pending

    assert graph_outlives_i(uncured), "trap 2 is gone: the attached input no longer holds the graph"
    assert not graph_outlives_i(cured)


def test_3_a_parameter_among_the_inputs_fires_its_hooks_in_i():
    class Uncured(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.weight = weight
            return F.linear(x, weight)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.mm(ctx.weight), None

    def hooks_in_i(run_i, weight) -> int:
        fired = []
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: fired.append("node"))
        weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
        run_i()
        return len(fired)

    weight = nn.Parameter(torch.randn(48, 48))
    assert hooks_in_i(lambda: Uncured.apply(batch(0), weight).sum().backward(), weight), "trap 3 is gone: no hook fired"

    layer = nn.Linear(48, 48)
    deferred = DeferredWeights(layer)

    def cured():
        with deferred.forward(), deferred.hold():
            layer(batch(0)).sum().backward()

    assert hooks_in_i(cured, layer.weight) == 0


def test_4_accumulating_inside_a_gemm_rounds_differently():
    torch.manual_seed(0)
    # rows enough that the GEMM works in blocks of them; with one block addmm_ happens to round the same
    pairs = [(batch(seed, 2048, 48).detach(), batch(100 + seed, 2048, 48).detach()) for seed in range(3)]
    layer = nn.Linear(48, 48)
    fused = copy.deepcopy(layer)
    for x, gradient in pairs:
        fused(x).backward(gradient)
    stock = fused.weight.grad

    in_place = torch.zeros(48, 48)
    for x, gradient in pairs:
        in_place.addmm_(gradient.t(), x)
    together = torch.cat([gradient for _, gradient in pairs]).t().mm(torch.cat([x for x, _ in pairs]))
    assert torch.allclose(stock, in_place, atol=1e-3) and torch.allclose(stock, together, atol=1e-3)
    # which of the two differs is up to the BLAS
    assert not (torch.equal(stock, in_place) and torch.equal(stock, together)), "trap 4 is gone"

    deferred = DeferredWeights(layer)
    for x, gradient in pairs:
        both_halves(deferred, lambda: layer(x), gradient)
    assert torch.equal(stock, layer.weight.grad)


class Eager(PendingWeights):
    """Uncured: accumulates each use of a parameter by itself."""

    def run(self) -> None:
        for use in self._work[:]:
            self._work = [use]
            super().run()


def test_5_uses_of_one_weight_are_summed_before_they_are_accumulated():
    def gradient_of(pending_type: type[PendingWeights] | None) -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(48, 48)
        deferred = DeferredWeights(layer) if pending_type else None
        for seed in range(3):
            with nullcontext() if deferred is None else deferred.forward():
                output = layer(torch.tanh(layer(torch.tanh(layer(batch(seed))))))
            gradient = batch(100 + seed).detach()
            if deferred is None:
                output.backward(gradient)
                continue
            with deferred.hold():
                deferred._deferral.held = pending = pending_type()
                output.backward(gradient)
            pending.run()
        return layer.weight.grad

    stock = gradient_of(None)
    assert not torch.equal(stock, gradient_of(Eager)), "trap 5 is gone: single accumulations round as their sum does"
    assert torch.equal(stock, gradient_of(PendingWeights))
