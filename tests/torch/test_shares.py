"""Shares of a replay in torch: how they travel, that their sums have the same bits, and that a helper is as it was."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recycle_plugin.adapters.plain.pipeline import _built, _made_again
from recycle_plugin.core.messages.from_coordinator import LogsAt
from recycle_plugin.core.vocabulary.blocks import Block, Blocks
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.helper import CantHelp
from recycle_plugin.core.worker.shares import Answer, Call, Lot, Share
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import CPU, There
from recycle_plugin.runtime.movers.shares import SentWeights, carried, word_of
from recycle_plugin.runtime.stage.block_sums import ALONE, BlockSums
from recycle_plugin.runtime.stage.gradient_store import TorchGradients
from recycle_plugin.runtime.stage.gradients import WorkerContributions
from recycle_plugin.runtime.stage.ports import MadeStage, StageModel
from recycle_plugin.runtime.stage.randomness import key, keyed, keyed_torch
from recycle_plugin.runtime.state.surroundings import layers_digest
from recycle_plugin.runtime.worker.helping import Helping, HowToMake, TorchHelpedStage

SHAPE, WIDTH = Topology(1, 3, 4), 6
BACK, ME = WorkerId(1, 1), WorkerId(2)
LAYERS = [partial(nn.Linear, WIDTH, WIDTH), lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), nn.Tanh()]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def test_words_come_as_they_were_said():
    weights = SentWeights((torch.rand(2, 3), torch.rand(4).bfloat16()), 2.0)
    act = Datum("act", 1, MicroBatch(0, 3), 7)
    sums = {Block(0, 1): (torch.rand(3),), Block(1, 0): (torch.rand(3),)}
    said = [
        Call(BACK, "tcp://here:1", 1, 99, (LogsAt("a token", ("tcp://there:1", "tcp://there:2"), (0, 2)),)),
        Answer(ME, BACK, "too little memory"),
        Lot(BACK, 3, 7, (Block(0, 1), Block(1, 0)), weights),
        Share(ME, BACK, 3, sums, ((act, There((torch.rand(2),))),)),
        Share(ME, BACK, 4, {None: (torch.rand(3),)}, ()),
    ]
    for word in said:
        datum, tensors = carried(word)
        found = word_of(tensors)
        assert datum.kind == "replay" and type(found) is type(word)
        assert not isinstance(word, Call) or found == word
        assert carried(found)[1][0].tolist() == tensors[0].tolist()
        assert [bits(each) for each in carried(found)[1]] == [bits(each) for each in tensors]


class Bench:
    """A stage that helps, of layer 1 of three, with what a session has to do."""

    def __init__(self, folder: Path, exact: bool = False, size: int = 1, **how: Any) -> None:
        session: Any = SimpleNamespace(
            view=ControlView(1), heartbeats=SimpleNamespace(at=lambda *_: nullcontext()), job_id="a job"
        )
        self.struck: list[str] = []
        self.world: Any = SimpleNamespace(reach=lambda when, seat, instruction: self.struck.append(str(instruction)))
        self.how = HowToMake(
            SHAPE,
            Seat(0, 0),
            **{
                "make": self.make,
                "randomness": lambda made, stage: partial(self.randomness, made, stage),
                "splits": True,
                "blocks": Blocks(SHAPE, size) if exact else None,
                "source": lambda: None,
            }
            | how,
        )
        self.helping = Helping(session, self.world, self.how, folder)

    def make(self, stage: int) -> MadeStage:
        model = StageModel(_made_again(LAYERS, range(stage, stage + 1), 3), None, 4, False, False, CPU)
        return MadeStage(model, lambda seed, place: keyed(seed, CPU))

    @staticmethod
    def randomness(made: MadeStage, stage: int, micro_batch: MicroBatch, step: int, half: str) -> Any:
        seed = key(5, step, micro_batch, stage, half)
        return keyed_torch(seed, CPU) if half else made.forward(seed, micro_batch.index)

    def ready(self, stage: int = 1, size: int = 100) -> TorchHelpedStage:
        try:
            next(self.helping.make_stage(Call(BACK, "there", stage, size)))
        except StopIteration as end:
            return end.value
        raise AssertionError("it has yielded")


def weights() -> SentWeights:
    module = _built(LAYERS, range(1, 2), 8)
    return SentWeights(tuple(each.detach().clone() for each in module.parameters()), 1.0, layers_digest(module))


def make(stage: TorchHelpedStage, sent: SentWeights, blocks: list[Block], size: int = 1) -> dict:
    stage.begin(5, sent)
    for block in blocks:
        for one in Blocks(SHAPE, size).members()[block]:
            there = torch.Generator().manual_seed(one.index)
            for kind, at in (("act", 0), ("grad", 2)):
                stage.store.put(Datum(kind, at, one, 5), (torch.rand(3, WIDTH, generator=there),))
            for op in (Op.F, Op.I, Op.W):
                instruction = Instruction(op, 1, one, 5)
                assert list(stage.spend(instruction)) == []
                stage.store.run(instruction, stage.compute)
    return stage.sums(5, blocks)


def all_blocks(size: int) -> list[Block]:
    return sorted(Blocks(SHAPE, size).members())


@pytest.mark.parametrize("size", (1, 2))
def test_sums_of_shares_have_the_bits_of_one_workers(tmp_path, size):
    """In exact mode, whoever has made which block, and in whichever order they come."""
    sent, blocks = weights(), all_blocks(size)
    alone = make(Bench(tmp_path, True, size).ready(), sent, blocks, size)
    parts = [make(Bench(tmp_path, True, size).ready(), sent, blocks[at::2], size) for at in (1, 0)]

    def total(sums: list[dict]) -> torch.Tensor:
        parameters = [nn.Parameter(torch.zeros_like(each)) for each in sent.tensors]
        there = BlockSums(TorchGradients(parameters), Blocks(SHAPE, size))
        contributions = WorkerContributions(TorchGradients(parameters), there, CPU)
        for each in sums:
            contributions.add(each)
        return there.total([*range(len(parameters))], there.owners(ALONE), ALONE)

    assert bits(total([alone])) == bits(total(parts))
    with pytest.raises(RecycleError, match="would be counted twice"):
        total([alone, parts[0]])


def test_outside_exact_mode_a_share_is_one_sum(tmp_path):
    sent, blocks = weights(), all_blocks(1)
    alone = make(Bench(tmp_path).ready(), sent, blocks)
    parameters = [nn.Parameter(torch.zeros_like(each)) for each in sent.tensors]
    contributions = WorkerContributions(TorchGradients(parameters), None, CPU)
    for at in (0, 1):
        part = make(Bench(tmp_path).ready(), sent, blocks[at::2])
        assert list(part) == [None]
        contributions.add(part)
    torch.testing.assert_close([each.grad for each in parameters], list(alone[None]))


def test_a_helper_is_afterwards_as_it_was(tmp_path):
    """Its own layers, and the streams of torch's and Python's random numbers: the helped layer drops out."""
    own = _built(LAYERS, range(1), 1)
    torch.manual_seed(11)
    random.seed(11)
    before = [bits(each) for each in own.parameters()], torch.get_rng_state().tolist(), random.getstate()
    stage = Bench(tmp_path).ready()
    make(stage, weights(), all_blocks(1))
    after = [bits(each) for each in own.parameters()], torch.get_rng_state().tolist(), random.getstate()
    assert after == before and all(each.grad is None for each in own.parameters())


def test_modules_that_were_given_are_copied():
    given = nn.Linear(2, 2)
    (made,) = _made_again([given], range(1), 0)
    assert made is not given and bits(made.weight) == bits(given.weight)
    made.weight.data.zero_()
    assert given.weight.abs().sum() > 0


def test_each_step_is_made_with_the_weights_that_came_with_it(tmp_path):
    stage, blocks, sent = Bench(tmp_path).ready(), all_blocks(1), weights()
    other = replace(sent, tensors=tuple(2 * each for each in sent.tensors))

    def outputs(given: SentWeights) -> bytes:
        make(stage, given, blocks)
        (output,) = stage.store[Datum("act", 1, MicroBatch(0, 0), 5)]
        return bits(output)

    first, second, again = outputs(sent), outputs(other), outputs(sent)
    assert first == again != second


def test_what_layers_are_set_to_is_in_their_digest():
    module = _built(LAYERS, range(1, 2), 8)
    before, dropout = layers_digest(module), module[0][1]
    assert layers_digest(_made_again(LAYERS, range(1, 2), 9)) == before, "weights are not"
    for change, back in (
        (lambda: dropout.eval(), lambda: dropout.train()),
        (lambda: setattr(dropout, "p", 0.1), lambda: setattr(dropout, "p", 0.5)),
        (lambda: dropout.register_forward_hook(lambda *_: None), lambda: dropout._forward_hooks.clear()),
    ):
        change()
        assert layers_digest(module) != before
        back()
        assert layers_digest(module) == before


def out_of_memory(stage: int) -> MadeStage:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


REFUSED = {
    "the script's own model": ({"make": None}, 1, 1, "the script runs the model itself"),
    "plain iterators": ({}, 2, 1, "plain iterators"),
    "too little memory": ({}, 1, 1 << 60, "too little memory: a stage of"),
    "an error of the layers'": ({"make": out_of_memory}, 1, 1, "OutOfMemoryError: CUDA out of memory"),
}


@pytest.mark.parametrize("how, stage, size, why", REFUSED.values(), ids=REFUSED)
def test_who_can_t_help_says_why(tmp_path, how, stage, size, why):
    with pytest.raises(CantHelp, match=why):
        Bench(tmp_path, **how).ready(stage, size)


def test_an_error_in_the_compute_is_a_refusal(tmp_path):
    stage = Bench(tmp_path).ready()
    with pytest.raises(CantHelp, match="layers differ here"):
        stage.begin(5, SentWeights((torch.zeros(3),), 1.0))
    with pytest.raises(CantHelp, match="differ from what their specs make"):
        stage.begin(5, replace(weights(), layers="of a layer that the script has set to evaluation"))
    stage.begin(5, weights())
    stage.store.put(Datum("act", 0, MicroBatch(0, 0), 5), (torch.rand(3, WIDTH + 1),))
    with pytest.raises(CantHelp, match="RuntimeError"):
        stage.store.run(Instruction(Op.F, 1, MicroBatch(0, 0), 5), stage.compute)
