"""Stages of odd models, and random numbers that a forward draws: what the differential tester does not see."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from megatron.core.tensor_parallel import random as megatron
from torch import nn
from torch.utils.checkpoint import checkpoint

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.stage.ports import StageModel
from recycle_plugin.runtime.stage.randomness import keyed
from recycle_plugin.runtime.stage.stage import Stage
from tests.support.stored_stage import StoredStage

WIDTH, KEY = 6, (2, MicroBatch(0, 0))


def given() -> torch.Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))


def one_forward(
    layers: Callable[[torch.Tensor], Any], reentrant: bool = False, **parts: nn.Module
) -> tuple[StoredStage, Any]:
    """A first stage of ``parts`` after a forward, and what that has made; ``reentrant``: as the config says."""
    module = nn.ModuleDict(parts)
    module.forward = layers
    model = StageModel(module, None, 1, True, False, CPU, lambda: reentrant)
    stage = StoredStage(Stage(model, None, lambda *_: keyed(7, CPU)), 0, 2)
    stage.load(KEY, (given(), None))
    return stage, stage.forward(KEY)


@pytest.mark.parametrize("run", (partial(checkpoint, use_reentrant=True), checkpointing.checkpoint))
def test_what_a_first_stage_checkpoints_is_trained(run):
    """Reentrant checkpointing wants data that requires a gradient."""
    inner = nn.Linear(WIDTH, WIDTH)
    stage, (made,) = one_forward(lambda data: run(inner, data), True, inner=inner)
    stage.receive_grad(KEY, (torch.ones_like(made),))
    stage.backward_input(KEY)
    found, _ = torch.autograd.grad(inner(given()).sum(), list(inner.parameters()))
    torch.testing.assert_close(inner.weight.grad, found)


def test_a_travelling_weight_is_not_changed_by_the_step():
    """The first stage's weight travels with the activation, as some tie a head to an embedding."""
    linear = nn.Linear(WIDTH, WIDTH)
    _, sent = one_forward(lambda data: (linear(data), linear.weight), linear=linear)
    was = linear.weight.detach().clone()
    with torch.no_grad():
        linear.weight.add_(1.0)
    assert torch.equal(sent[1], was)


def test_layers_that_checkpointing_cuts_off_are_refused():
    """Stock DeepSpeed stops with an error of autograd's; to go on would leave them untrained without a word."""
    words = nn.Embedding(9, WIDTH)
    stage, _ = one_forward(lambda data: checkpoint(words, data.abs().long() % 9, use_reentrant=True), words=words)
    stage.receive_grad(KEY, (torch.ones(2, 3, WIDTH, WIDTH),))
    stage.backward_input(KEY)
    with pytest.raises(
        RecycleError,
        match="nothing that the first stage gives depends on its parameters.*set pipeline.use_reentrant to false",
    ):
        stage.summed(KEY[0])


@pytest.mark.parametrize("stream", (numpy.random.seed, random.seed))
def test_a_stream_goes_on_with_the_normal_number_that_it_has_kept(stream):
    """It draws two at a time: the second one is kept beside the generator's bytes."""
    normal, plain = (numpy.random.randn, numpy.random.rand) if stream is numpy.random.seed else (gauss, random.random)

    def drawn(inside: Callable[[], None]) -> list[float]:
        stream(3)
        inside()
        found = []
        for _ in range(4):  # a number is kept, gone, kept, gone
            found.append(normal())
            inside()
        return [*found, plain()]

    def keyed_draws() -> None:
        for _ in range(2):
            with keyed(5, CPU):
                of_key.append(normal())

    of_key: list[float] = []
    assert drawn(keyed_draws) == drawn(lambda: None) and len(set(of_key)) == 1


def gauss() -> float:
    return random.gauss(0.0, 1.0)


def test_pythons_stream_goes_on_wherever_it_stands():
    """All its numbers come back, also if more than it holds were drawn inside."""
    random.seed(2)
    for _ in range(700):
        before = random.getstate()
        with keyed(5, CPU):
            assert random.getstate() == random.Random(5).getstate()
            [random.random() for _ in range(400)]
        assert random.getstate() == before
        random.random()


@pytest.mark.parametrize("draw", (random.random, numpy.random.rand, lambda: torch.rand(()).item()))
def test_what_is_drawn_in_a_forward_leaves_the_scripts_own_streams_alone(draw):
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = [draw(), draw()]
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    found = [draw()]
    with keyed(5, CPU):
        inside = draw()
    with keyed(5, CPU):
        assert draw() == inside
    assert [*found, draw()] == expected


@pytest.fixture(params=("deepspeed", "megatron"))
def tracker(request, monkeypatch):
    """A library's tracker of random states with two streams; megatron-core's asks for CUDA's, and gets the host's."""
    if request.param == "megatron":
        monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
        monkeypatch.setattr(torch.cuda, "manual_seed", torch.manual_seed)
        monkeypatch.setattr(megatron, "_get_cuda_rng_state", lambda **named: torch.get_rng_state())
        monkeypatch.setattr(megatron, "_set_cuda_rng_state", lambda state, **named: torch.set_rng_state(state))
        monkeypatch.setattr(megatron, "_CUDA_RNG_STATE_TRACKER", megatron.CudaRNGStatesTracker())
        # it says that the host's has changed
        monkeypatch.setattr(logging.getLogger(megatron.__name__), "disabled", True)
    made = megatron._CUDA_RNG_STATE_TRACKER if request.param == "megatron" else checkpointing.get_cuda_rng_tracker()
    made.reset()
    made.add("tensor parallel", 11), made.add("other", 12)
    yield made
    made.reset()


def test_what_is_drawn_through_a_tracker_is_the_same_whoever_draws(tracker):
    """Megatron's layers draw dropout from streams of one, and each goes on from forward to forward."""

    def draw(name: str) -> float:
        with tracker.fork(name):
            return torch.rand(()).item()

    before, streams = tracker.get_states(), torch.get_rng_state()
    with keyed(5, CPU):
        own, first, second = torch.rand(()).item(), draw("tensor parallel"), draw("other")
    assert tracker.get_states() == before and torch.equal(torch.get_rng_state(), streams)
    draw("tensor parallel")
    with keyed(5, CPU):
        assert [torch.rand(()).item(), draw("tensor parallel"), draw("other")] == [own, first, second]
    with keyed(6, CPU):
        assert draw("tensor parallel") != first
    assert len({own, first, second}) == 3


def test_a_forward_is_seeded_by_the_place_of_its_micro_batch():
    from recycle_plugin.adapters.deepspeed.model import keyed_forward

    module = nn.Module()
    with keyed_forward(module, 5, 3, CPU):
        assert module.micro_offset == 3
