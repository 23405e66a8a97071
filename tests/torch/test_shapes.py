"""Models of the shapes that people have, cut into stages: the gradients of the uncut model, and what a peer makes once
more.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
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
from recycle_plugin.runtime.stage.randomness import key as random_key
from recycle_plugin.runtime.stage.randomness import keyed
from recycle_plugin.runtime.stage.split_backward import DeferredWeights
from recycle_plugin.runtime.stage.stage import Stage
from tests.support.stored_stage import StoredStage

WIDTH, MICRO_BATCHES, STEP = 6, 3, 2
Batch = tuple[Any, torch.Tensor]


def mean_square(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return (outputs[0] if isinstance(outputs, tuple) else outputs).pow(2).mean() + labels.mean()


class Layer(nn.Module):
    """``compute(module, given)`` over the ``parts``."""

    def __init__(self, compute: Callable[[nn.ModuleDict, Any], Any], **parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.compute = nn.ModuleDict(parts), compute

    def forward(self, given: Any) -> Any:
        return self.compute(self.parts, given)


class Pipeline:
    """Stages as the engine drives them; what goes from one to the next is copied, as on its way through a socket."""

    def __init__(self, modules: list[nn.Module], split: bool, reentrant: bool = False) -> None:
        last = len(modules) - 1
        self._received: dict[tuple[int, Any], tuple[torch.Tensor, ...]] = {}
        self.stages = [
            StoredStage(
                Stage(
                    StageModel(module, mean_square, MICRO_BATCHES, number == 0, number == last, CPU, lambda: reentrant),
                    DeferredWeights(module) if split else None,
                    lambda micro_batch, step, half, number=number: randomness(number, micro_batch.index),
                ),
                number,
                len(modules),
            )
            for number, module in enumerate(modules)
        ]

    def step(self, batches: list[Batch]) -> list[torch.Tensor]:
        """All forwards, then the backwards, each boundary's made once more, by a bare instruction, for a peer.

        The losses.
        """
        keys = [(STEP, MicroBatch(0, index)) for index in range(len(batches))]
        for key, batch in zip(keys, batches):
            self._forward(key, batch)
        for key, batch in zip(keys, batches):
            self._backward(key, batch)
        return [self.stages[-1].losses[key] for key in keys]

    def _forward(self, key, batch: Batch) -> None:
        travels: tuple[torch.Tensor, ...] = ()
        for number, stage in enumerate(self.stages):
            self._received[number, key] = travels
            made = []
            for boundary_only in (True, False):
                self._feed(stage, number, key, batch)
                made.append(stage.forward(key, boundary_only))
            assert close(*made)  # without a graph torch may choose kernels that round differently
            travels = tuple(tensor.detach().clone() for tensor in made[0])

    def _feed(self, stage: StoredStage, number: int, key, batch: Batch) -> None:
        if number == 0:
            stage.load(key, batch)
        else:
            stage.receive_activation(key, tuple(tensor.clone() for tensor in self._received[number, key]))
        if number == len(self.stages) - 1:
            stage.load(key, batch)

    def _backward(self, key, batch: Batch) -> None:
        travels: tuple[torch.Tensor, ...] | None = None
        for number, stage in reversed(list(enumerate(self.stages))):
            if travels is not None:
                stage.receive_grad(key, travels)
            made = tuple(tensor.clone() for tensor in stage.backward_input(key))
            self._feed(stage, number, key, batch)
            stage.forward(key)
            if travels is not None:
                stage.receive_grad(key, travels)
            assert same(stage.backward_input_boundary_only(key), made)
            stage.backward_weight(key)
            travels = made


def randomness(stage: int, index: int):
    return keyed(random_key(7, STEP, MicroBatch(0, index), stage), CPU)


def same(ones: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(ones, others, strict=True))


def close(ones: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    return all(
        torch.allclose(one, other, rtol=1e-5, atol=1e-6) and one.dtype == other.dtype
        for one, other in zip(ones, others, strict=True)
    )


def uncut(modules: list[nn.Module], batches: list[Batch]) -> list[torch.Tensor]:
    """The losses; gradients go to the parameters."""
    losses = []
    for index, (inputs, labels) in enumerate(batches):
        given = tuple(part.clone() for part in inputs) if isinstance(inputs, (tuple, list)) else inputs.clone()
        for stage, module in enumerate(modules):
            with randomness(stage, index):
                given = module(given)
        losses.append(mean_square(given, labels))
        (losses[-1] / MICRO_BATCHES).backward()
    return [loss.detach() for loss in losses]


def linear(**more: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **more)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def masked() -> list[nn.Module]:
    """(mask, hidden, positions, what is summed on the way, what nobody uses) between the stages: bool first, int in
    between, one of no dimension.
    """

    def embed(parts, given):
        ids, mask = given
        return mask, parts["words"](ids), ids, torch.zeros(()), torch.ones(2)

    def block(parts, given):
        mask, hidden, ids, total, unused = given
        hidden = parts["linear"](hidden).masked_fill(mask.unsqueeze(-1), 0.0) + ids.unsqueeze(-1)
        return mask, hidden, ids, total + hidden.pow(2).mean(), unused

    def head(parts, given):
        return parts["linear"](given[1]) + given[3]

    return [
        Layer(embed, words=nn.Embedding(9, WIDTH)),
        *(Layer(block, linear=linear()) for _ in range(2)),
        Layer(head, linear=linear()),
    ]


def float_mask() -> list[nn.Module]:
    """It comes from the data, so that no gradient leads anywhere; and it is used."""

    def add(parts, given):
        return given[0], parts["linear"](given[1]) * given[0]

    return [
        Layer(add, linear=linear()),
        Layer(add, linear=linear()),
        Layer(lambda parts, given: parts["linear"](given[1]), linear=linear()),
    ]


def tuples_of_one() -> list[nn.Module]:
    return [
        Layer(lambda parts, given: (parts["linear"](given),), linear=linear()),
        Layer(lambda parts, given: parts["linear"](given[0]), linear=linear()),
    ]


def empty_masks() -> list[nn.Module]:
    """Members that look like the mark of a tuple of one."""

    def give(parts, given):
        return parts["linear"](given), torch.empty(0, 0, dtype=torch.bool)

    def take(parts, given):
        hidden, mask = given
        return parts["linear"](hidden) * (1 + mask.numel())

    return [Layer(give, linear=linear()), Layer(take, linear=linear())]


def in_place() -> list[nn.Module]:
    return [
        nn.Sequential(nn.ReLU(inplace=True), linear()),
        nn.Sequential(nn.ReLU(inplace=True), linear()),
        nn.Sequential(nn.ReLU(inplace=True), linear()),
    ]


def recurrent() -> list[nn.Module]:
    def run(parts, given):
        return parts["linear"](parts["lstm"](given)[0])

    stages = [
        Layer(run, lstm=nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True), linear=linear())
        for _ in range(2)
    ]
    return [*stages, Layer(lambda parts, given: parts["gru"](given)[0], gru=nn.GRU(WIDTH, WIDTH, batch_first=True))]


def convolution() -> list[nn.Module]:
    def run(parts, given):
        return parts["linear"](torch.relu(parts["norm"](parts["conv"](given.transpose(1, 2)))).transpose(1, 2))

    return [
        Layer(run, conv=nn.Conv1d(WIDTH, WIDTH, 3, padding=1), norm=nn.GroupNorm(2, WIDTH), linear=linear())
        for _ in range(2)
    ]


def checkpointed(run: Callable[..., Any]) -> list[nn.Module]:
    parts = lambda: nn.Sequential(linear(), nn.Dropout(0.4), nn.GELU(), linear())
    return [Layer(lambda parts, given: run(parts["inner"], given), inner=parts()) for _ in range(3)]


def sometimes() -> list[nn.Module]:
    """A layer that half of the micro-batches leave out."""

    def run(parts, given):
        return parts["always"](given) if given.sum() > 0 else parts["always"](parts["sometimes"](given))

    return [Layer(run, always=linear(), sometimes=linear()) for _ in range(2)]


def dropped() -> list[nn.Module]:
    """Layers that Python's, or numpy's, random numbers leave out."""

    def run(parts, given):
        draw = random.random() if len(parts) == 1 else numpy.random.rand()
        return given + parts["a"](given) if draw > 0.5 else given * 2

    return [linear(), Layer(run, a=linear()), Layer(run, a=linear(), b=nn.Identity()), linear()]


def passed_on() -> list[nn.Module]:
    """The first stage's weight travels with the activation, as some tie a head to an embedding."""

    def give(parts, given):
        return parts["linear"](given), parts["linear"].weight

    return [
        Layer(give, linear=linear()),
        Layer(lambda parts, given: parts["linear"](given[0]) @ given[1], linear=linear()),
    ]


def vectors(index: int) -> torch.Tensor:
    """Of another length for each micro-batch."""
    return torch.randn(2, 3 + index, WIDTH, generator=torch.Generator().manual_seed(index))


def ids(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randint(9, (2, 3 + index), generator=torch.Generator().manual_seed(index))
    return made, made < 4


MODELS: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[int], Any]]] = {
    "bool first, int, no dimension, unused": (masked, ids),
    "lists from a loader": (masked, lambda index: list(ids(index))),
    "a float mask from the data": (float_mask, lambda index: (ids(index)[1].unsqueeze(-1).float(), vectors(index))),
    "tuples of one": (tuples_of_one, vectors),
    "empty masks": (empty_masks, vectors),
    "layers that change their input in place": (in_place, vectors),
    "LSTM and GRU": (recurrent, vectors),
    "convolutions": (convolution, vectors),
    "first stage frozen": (lambda: [frozen(linear()), linear(), linear()], vectors),
    "last stage frozen": (lambda: [linear(), linear(), frozen(linear())], vectors),
    "a stage between frozen": (lambda: [linear(), frozen(linear()), linear()], vectors),
    "layers and biases frozen": (
        lambda: [nn.Sequential(frozen(linear()), linear()), nn.Sequential(linear(), frozen(linear())), linear()],
        vectors,
    ),
    "checkpointed, reentrant": (lambda: checkpointed(lambda part, x: checkpoint(part, x, use_reentrant=True)), vectors),
    "checkpointed, not reentrant": (
        lambda: checkpointed(lambda part, x: checkpoint(part, x, use_reentrant=False)),
        vectors,
    ),
    "checkpointed by DeepSpeed": (lambda: checkpointed(checkpointing.checkpoint), vectors),
    "checkpointed by DeepSpeed, not reentrant": (lambda: checkpointed(checkpointing.non_reentrant_checkpoint), vectors),
    "layers that are left out sometimes": (sometimes, vectors),
    "layers that are left out at random": (dropped, vectors),
    "a weight that travels": (passed_on, vectors),
}
REENTRANT = ("checkpointed, reentrant", "checkpointed by DeepSpeed")  # for which data has to require a gradient


@pytest.mark.parametrize("split", (True, False), ids=("split", "fused"))
@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_of_the_uncut_model(name, split):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    modules = make()
    if "biases" in name:
        modules[2].bias.requires_grad = False
    batches = [(inputs(index), torch.ones(2) * index) for index in range(MICRO_BATCHES)]
    before = [
        [part.clone() for part in (batch[0] if isinstance(batch[0], (tuple, list)) else [batch[0]])]
        for batch in batches
    ]
    cuts_off = name in REENTRANT
    trained = [
        (f"{stage}.{part}", parameter)
        for stage, module in enumerate(modules)
        for part, parameter in module.named_parameters()
    ]
    expected_losses = uncut(
        modules, [(inputs.requires_grad_(), labels) for inputs, labels in batches] if cuts_off else batches
    )
    expected = {part: parameter.grad for part, parameter in trained}
    assert all(expected[part] is not None for part, parameter in trained if parameter.requires_grad)
    for _, parameter in trained:
        parameter.grad = None
    losses = Pipeline(modules, split, reentrant=cuts_off).step(
        [(inputs.detach() if cuts_off else inputs, labels) for inputs, labels in batches]
    )
    assert close(tuple(losses), tuple(expected_losses))
    for part, parameter in trained:
        if expected[part] is None:
            assert parameter.grad is None, part
        else:
            assert torch.allclose(parameter.grad, expected[part], rtol=1e-5, atol=1e-7) and parameter.requires_grad, (
                part
            )
    assert any(grad is not None and grad.abs().sum() > 0 for grad in expected.values())
    for batch, kept in zip(batches, before):
        assert same(tuple(batch[0]) if isinstance(batch[0], (tuple, list)) else (batch[0],), tuple(kept)), (
            "the data has been changed"
        )


def test_a_travelling_weight_is_not_changed_by_the_step():
    modules = passed_on()
    stage = StoredStage(
        Stage(StageModel(modules[0], None, 1, True, False, CPU), None, lambda *_: randomness(0, 0)), 0, 2
    )
    key = STEP, MicroBatch(0, 0)
    stage.load(key, (vectors(0), None))
    sent = stage.forward(key)
    was = modules[0].parts["linear"].weight.detach().clone()
    with torch.no_grad():
        modules[0].parts["linear"].weight.add_(1.0)
    assert torch.equal(sent[1], was)


# --- what will not do -------------------------------------------------------------------------------


def one_forward(
    module: nn.Module, first: bool = True, last: bool = False, loss: Callable[..., Any] | None = None
) -> StoredStage:
    stage = StoredStage(
        Stage(StageModel(module, loss, 1, first, last, CPU), None, lambda *_: randomness(0, 0)), 0, 1 if last else 2
    )
    stage.load((STEP, MicroBatch(0, 0)), (vectors(0), torch.ones(2)))
    stage.forward((STEP, MicroBatch(0, 0)))
    return stage


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return given


@pytest.mark.parametrize(
    "module, buffer",
    [
        (nn.Sequential(linear(), Counting()), "1.seen"),
        (nn.utils.parametrizations.spectral_norm(linear()), "parametrizations.weight.0._u"),
    ],
)
def test_layers_that_count_their_forwards_are_refused(module, buffer):
    with pytest.raises(RecycleError, match=rf"{buffer} is changed by each forward in training"):
        one_forward(module)


def test_renormalised_embeddings_are_refused():
    module = Layer(
        lambda parts, given: parts["words"](given.abs().long() % 9), words=nn.Embedding(9, WIDTH, max_norm=0.1)
    )
    with pytest.raises(RecycleError, match="parts.words.weight is changed by each forward"):
        one_forward(module)


@pytest.mark.parametrize(
    "made, said", [([], "list"), ((torch.ones(1), None), "NoneType"), ((), "an empty tuple"), ({}, "dict")]
)
def test_what_can_not_travel_is_refused(made, said):
    with pytest.raises(
        RecycleError,
        match=rf"the last layer of a stage gives {said}: what goes to the next stage is a tensor, or a tuple of "
        r"tensors",
    ):
        one_forward(Layer(lambda parts, given: made, linear=linear()))


@pytest.mark.parametrize("made, said", [((1, 2), "a tuple"), (torch.ones(3), r"a tensor of shape \[3\]")])
def test_losses_that_are_no_number_are_refused(made, said):
    with pytest.raises(RecycleError, match=f"the loss of a micro-batch is {said}: loss_fn"):
        one_forward(linear(), last=True, loss=lambda outputs, labels: made)


def test_layers_that_checkpointing_cuts_off_are_refused():
    """Stock DeepSpeed stops with an error of autograd's; to go on would leave them untrained without a word."""
    inner = nn.Embedding(9, WIDTH)
    stage = one_forward(
        Layer(lambda parts, given: checkpoint(parts["words"], given.abs().long() % 9, use_reentrant=True), words=inner)
    )
    key = STEP, MicroBatch(0, 0)
    stage.receive_grad(key, (torch.ones(2, 3, WIDTH, WIDTH),))
    stage.backward_input(key)
    with pytest.raises(
        RecycleError,
        match="nothing that the first stage gives depends on its parameters.*set pipeline.use_reentrant to false",
    ):
        stage.summed(STEP)


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
