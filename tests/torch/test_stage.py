"""What a stage makes, holds and counts, instruction by instruction, and what it makes once more for a peer."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recycle_plugin.core.vocabulary.dataflow import Datum, consumes, provides, requires
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.stage.backward_choice import SAMPLES, WARM_UP, Key
from recycle_plugin.runtime.stage.block_sums import BlockSums
from recycle_plugin.runtime.stage.gradient_store import TorchGradients
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.stage.ports import StageModel
from recycle_plugin.runtime.stage.randomness import key as random_key
from recycle_plugin.runtime.stage.randomness import keyed
from recycle_plugin.runtime.stage.split_backward import DeferredWeights
from recycle_plugin.runtime.stage.stage import LoadedBatch, Stage
from tests.support.differential.plugin import Alone
from tests.support.late_device import Asked, LateDevice
from tests.support.stored_stage import StoredStage

WIDTH, STEP = 8, 7
FIRST, SECOND = MicroBatch(0, 0), MicroBatch(1, 2)
PLACES = {"first": (3, 0), "middle": (3, 1), "last": (3, 2), "only": (1, 0)}  # number of stages, stage


class Checkpointed(nn.Sequential):
    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def stage_at(
    stages: int,
    stage: int,
    split: bool,
    reentrant: bool | None,
    block: int | None = None,
    bf16: bool = False,
    device: Device = CPU,
) -> tuple[Stage, nn.Module, list[nn.Parameter], BlockSums | None]:
    """Linears, which are converted, with a LayerNorm, which is not, and dropout between them.

    ``reentrant``: checkpointed, that way. ``block``: exact, with blocks of so many of 2 x 4 micro-batches.  The
    parameters are those whose gradients are summed.
    """
    torch.manual_seed(stage)
    layers = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    module = nn.Sequential(*layers) if reentrant is None else Checkpointed(*layers)
    module.reentrant = reentrant
    masters = Masters(module.bfloat16().parameters()) if bf16 else None
    parameters = list(module.parameters()) if masters is None else masters.parameters
    blocks = (
        None if block is None else BlockSums(TorchGradients(parameters), Policy(block=block).blocks(Topology(2, 3, 4)))
    )
    model = StageModel(module, nn.functional.mse_loss, 2, stage == 0, stage == stages - 1, device)
    deferred = DeferredWeights(module) if split else None
    draws = lambda micro_batch, step, half: keyed(random_key(1, step, micro_batch, stage, half), device)
    return Stage(model, deferred, draws, blocks, masters), module, parameters, blocks


def tensor(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def feed(stage: StoredStage, key: Key, wanted: Iterable[Datum]) -> None:
    """Give ``stage`` of these data what comes from outside; the same for the same micro-batch."""
    seed, dtype = 10 * key[1].replica + key[1].index, next(stage.stage._model.module.parameters()).dtype
    for datum in wanted:
        match datum.kind:
            case "data":
                stage.load(key, (tensor(seed, dtype), tensor(seed + 100, dtype)))
            case "act":
                stage.receive_activation(key, (tensor(seed + 200, dtype),))
            case "grad":
                stage.receive_grad(key, (tensor(seed + 300, dtype),))


class Runner:
    """A stage at one of PLACES that gets the inputs of each instruction when that runs."""

    def __init__(
        self,
        place: str,
        split: bool = True,
        reentrant: bool | None = None,
        block: int | None = None,
        bf16: bool = False,
        device: Device = CPU,
    ) -> None:
        self.stages, self.number = PLACES[place]
        made = stage_at(self.stages, self.number, split, reentrant, block, bf16, device)
        stage, self.module, self.parameters, self.blocks = made
        self.stage = StoredStage(stage, self.number, self.stages)

    def instruction(self, op: Op, micro_batch: MicroBatch = FIRST, step: int = STEP) -> Instruction:
        return Instruction(op, self.number, micro_batch, step)

    def run(
        self, op: Op, micro_batch: MicroBatch = FIRST, step: int = STEP, boundary_only: bool = False
    ) -> tuple[torch.Tensor, ...] | None:
        key = step, micro_batch
        feed(self.stage, key, requires(self.instruction(op, micro_batch, step), self.stages))
        return self.perform(op, key, boundary_only)

    def perform(self, op: Op, key: Key, boundary_only: bool = False) -> tuple[torch.Tensor, ...] | None:
        match op:
            case Op.F:
                return self.stage.forward(key, boundary_only)
            case Op.I:
                return self.stage.backward_input_boundary_only(key) if boundary_only else self.stage.backward_input(key)
            case Op.W:
                return self.stage.backward_weight(key)
            case Op.B:
                return self.stage.backward(key)

    def held(self) -> set[Datum]:
        return self.stage.held()

    def gradients(self) -> list[torch.Tensor | None]:
        return [None if parameter.grad is None else parameter.grad.clone() for parameter in self.parameters]


def same(mine: Iterable[torch.Tensor | None], theirs: Iterable[torch.Tensor | None]) -> bool:
    return all(one is other is None or torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@contextmanager
def no_gradient_changes(runner: Runner):
    before = runner.gradients()
    yield
    assert same(runner.gradients(), before)


# --- what is here -----------------------------------------------------------------------------------

HERE = {"stash", "inner", "wgrad"}  # made and kept by a stage; act and grad go out, data and params are nobody's
SPLIT, FUSED = (Op.F, Op.I, Op.W), (Op.F, Op.B)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ops", (SPLIT, FUSED), ids=("F, I, W", "F, B"))
def test_held_is_what_the_dataflow_says(place, ops):
    """With another micro-batch of the same step in every stage of its life beside it."""
    for beside in range(len(ops) + 1):
        runner = Runner(place)
        for op in ops[:beside]:
            runner.run(op, SECOND)
        expected = runner.held()
        for op in ops:
            one = runner.instruction(op)
            needed = {datum for datum in requires(one, runner.stages) if datum.kind not in ("data", "params")}
            feed(
                runner.stage,
                (STEP, FIRST),
                needed | {datum for datum in requires(one, runner.stages) if datum.kind == "data"},
            )
            expected |= {datum for datum in needed if datum.kind in ("act", "grad")}
            assert runner.held() == expected and needed <= expected, f"before {one}"
            runner.perform(op, (STEP, FIRST))
            expected = expected - set(consumes(one, runner.stages)) | {
                datum for datum in provides(one) if datum.kind in HERE
            }
            assert runner.held() == expected, f"after {one}"
        own = tuple(datum.micro_batch for datum in expected if datum.kind == "wgrad")
        runner.stage.summed(STEP)
        assert runner.held() == expected - set(
            consumes(Instruction(Op.REDUCE, runner.number, None, STEP), runner.stages, own)
        )


# --- once more, for a peer --------------------------------------------------------------------------


@pytest.mark.parametrize("split", (True, False))
@pytest.mark.parametrize(
    "place, op, reentrant",
    [
        *(("first", Op.F, None), ("middle", Op.F, None), ("middle", Op.I, None), ("last", Op.I, None)),
        *(("middle", Op.I, True), ("middle", Op.I, False)),
    ],
)
def test_what_is_made_for_a_peer_is_the_same_and_leaves_nothing(place, op, reentrant, split):
    full, boundary_only = Runner(place, split, reentrant), Runner(place, split, reentrant)
    for runner in (full, boundary_only):
        runner.run(Op.F, SECOND), runner.run(Op.B, SECOND)
        if op is Op.I:
            runner.run(Op.F)
    with no_gradient_changes(boundary_only):
        made = boundary_only.run(op, boundary_only=True)
    before = full.gradients()
    assert same(made, full.run(op)) and not any(tensor.requires_grad for tensor in made)
    assert same(full.gradients(), before) == (op is Op.F), "the LayerNorm's are not split: a full I changes gradients"
    assert boundary_only.held() == {Datum("wgrad", boundary_only.number, SECOND, STEP)}


@pytest.mark.parametrize("split", (True, False))
@pytest.mark.parametrize("place", ("middle", "last"))
def test_a_pending_weight_gradient_waits_while_its_micro_batch_is_run_once_more(place, split):
    """Its gradient is taken once, whatever was made of it for others in between."""
    calm, runner = Runner(place, split), Runner(place, split)
    for one in (calm, runner):
        one.run(Op.F), one.run(Op.I)
    with no_gradient_changes(runner):
        runner.run(Op.F, boundary_only=True)
        runner.run(Op.F)
        assert runner.held() == {Datum(kind, runner.number, FIRST, STEP) for kind in ("stash", "inner")}
        runner.run(Op.I, boundary_only=True)
    assert runner.held() == {Datum("inner", runner.number, FIRST, STEP)}
    calm.run(Op.W), runner.run(Op.W)
    assert same(runner.gradients(), calm.gradients()) and all(gradient is not None for gradient in runner.gradients())
    assert runner.held() == {Datum("wgrad", runner.number, FIRST, STEP)}


def choose_whole(runner: Runner, *micro_batches: MicroBatch) -> None:
    """Begin a program of a recovery in which the W of these follow their I."""
    program = [Instruction(op, runner.number, one, STEP) for one in micro_batches for op in (Op.I, Op.W)]
    if (choice := runner.stage.stage.choice) is not None:
        choice.begin(StepProgram(STEP, tuple(program), resumed=True))


@pytest.mark.parametrize("block", (None, 1))
@pytest.mark.parametrize("reentrant", (None, False))
@pytest.mark.parametrize("place", ("first", "only"))
def test_halves_that_follow_each_other_are_one_but_in_the_first_backward_and_in_exact_mode(place, reentrant, block):
    """The first backward shows how much a W holds. The sums have the same bits, where they are not of blocks."""
    apart, fused = Runner(place, True, reentrant, block), Runner(place, True, reentrant, block)
    choose_whole(fused, FIRST, SECOND)
    for one in (FIRST, SECOND):
        whole = one is SECOND and block is None
        for runner in (apart, fused):
            runner.run(Op.F, one), runner.run(Op.I, one)
            inner = runner.stage.store[Datum("inner", runner.number, one, STEP)]
            assert (inner.pending is None) == (whole and runner is fused)
        if whole:
            with no_gradient_changes(fused):
                fused.run(Op.W, one)
        else:
            fused.run(Op.W, one)
        apart.run(Op.W, one)
    assert fused.stage.stage.held.pending == apart.stage.stage.held.pending
    assert same(fused.gradients(), apart.gradients())


@pytest.mark.parametrize("bf16", (False, True))
@pytest.mark.parametrize("place", ("first", "only"))
def test_which_way_was_shorter_changes_no_bit_and_one_way_holds_for_a_program(place, bf16):
    """Each I adds before the next, whole or not, as each W does."""
    batch = [MicroBatch(0, index) for index in range(SAMPLES)]
    trained = []
    for whole_us in (1, 3):
        runner, ways = Runner(place, bf16=bf16), []
        choice = runner.stage.stage.choice
        for step in range(STEP, STEP + WARM_UP + 4):
            make = lambda op, one: runner.instruction(op, one, step)
            text = [make(op, one) for op in (Op.F, Op.I, Op.W) for one in batch]
            choice.begin(StepProgram(step, tuple(text)))
            for one in text:
                runner.run(one.op, one.works_on, step)
                whole = one.op is Op.I and runner.stage.store[Datum("inner", one.stage, one.works_on, step)].pending
                if one.op is Op.I:
                    ways.append(whole is None)
                if choice.measuring:
                    choice.ran(Span(Seat(0, 0), one, 0, whole_us if one.op is Op.I and ways[-1] else 2))
        trained.append(runner.gradients())
        ways = [ways[SAMPLES * step : SAMPLES * (step + 1)] for step in range(WARM_UP + 4)]
        expected = [*[False] * WARM_UP, False, True, *[whole_us == 1] * 2]
        assert ways == [[way] * SAMPLES for way in expected]
    assert same(*trained) and all(gradient is not None for gradient in trained[0])


def test_a_backward_is_made_as_its_forward_was_whatever_program_follows():
    calm, runner = Runner("first"), Runner("first")
    for one in (calm, runner):
        one.run(Op.F), one.run(Op.I), one.run(Op.W), one.run(Op.F, SECOND)
    choose_whole(runner, SECOND)  # in the recovery from a failure
    runner.run(Op.I, SECOND), calm.run(Op.I, SECOND)
    assert same(runner.gradients(), calm.gradients())
    runner.run(Op.W, SECOND), calm.run(Op.W, SECOND)
    assert same(runner.gradients(), calm.gradients())


@pytest.mark.parametrize("after", ("its activation", "its forward", "the gradient of its output"))
def test_a_weight_gradient_leaves_what_its_input_gradient_needs_once_more(after):
    calm, runner = Runner("middle"), Runner("middle")
    for one in (calm, runner):
        one.run(Op.F)
    expected = calm.run(Op.I)
    runner.run(Op.I), calm.run(Op.W)
    once_more = {"its activation": Op.F, "its forward": None, "the gradient of its output": Op.I}[after]
    if after != "its activation":
        runner.run(Op.F)
    if once_more is not None:
        feed(
            runner.stage,
            (STEP, FIRST),
            [datum for datum in requires(runner.instruction(once_more), 3) if datum.kind in ("act", "grad")],
        )
    runner.run(Op.W)
    assert len(runner.held() - {Datum("wgrad", 1, FIRST, STEP)}) == 1 + (after == "the gradient of its output")
    if after == "its activation":
        runner.perform(Op.F, (STEP, FIRST))
    assert same(runner.run(Op.I, boundary_only=True), expected)
    assert same(runner.gradients(), calm.gradients())
    assert runner.held() == {Datum("wgrad", 1, FIRST, STEP)}


@pytest.mark.parametrize("ops", (SPLIT, FUSED), ids=("F, I, W", "F, B"))
def test_a_micro_batch_that_is_counted_twice_is_refused(ops):
    runner = Runner("last")
    for op in ops:
        runner.run(op)
        runner.run(op, SECOND)
        runner.run(op, step=STEP + 1)
    for op in ops[:-1]:
        runner.run(op)
    with pytest.raises(AssertionError, match=r"micro-batch 0\.0, step 7 would be counted twice"):
        runner.run(ops[-1])


# --- on a device of which nothing is there before it is waited for ----------------------------------

BATCHES, RECEIVED = Asked("device", "a batch", False), Asked("device", "what goes into a forward", True)
GRADIENT = Asked("device", "what goes into a backward", True)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ops", (SPLIT, FUSED), ids=("F, I, W", "F, B"))
@pytest.mark.parametrize("bf16", (False, True), ids=("fp32", "bf16"))
def test_a_stage_waits_for_all_that_it_computes_with(place, ops, bf16):
    late = LateDevice()
    here, there = Runner(place, bf16=bf16), Runner(place, bf16=bf16, device=late)
    for micro_batch in (FIRST, SECOND):
        for op in ops:
            mine, theirs = here.run(op, micro_batch), there.run(op, micro_batch)
            assert mine is theirs is None or same(mine, theirs)
    assert same(here.gradients(), there.gradients()) and not late.under_way
    assert all(
        torch.equal(loss, there.stage.losses[key]) and loss.isfinite() for key, loss in here.stage.losses.items()
    )
    first, last = here.number == 0, here.number == here.stages - 1
    assert set(late.asked) == {RECEIVED, *[BATCHES] * (first or last), *[GRADIENT] * (not last)}


def test_what_a_stage_has_received_stays_as_it_came_for_whoever_runs_it_once_more():
    late = LateDevice()
    runner = Runner("middle", device=late)
    given = tensor(200, torch.float32)
    runner.stage.receive_activation((STEP, FIRST), (given,))
    before, made = given.clone(), runner.perform(Op.F, (STEP, FIRST), boundary_only=True)
    runner.stage.receive_activation((STEP, FIRST), (given,))
    assert same(made, runner.perform(Op.F, (STEP, FIRST))) and torch.equal(given, before) and not given.requires_grad


# --- bf16: fp32 sums --------------------------------------------------------------------------------

BATCH = [MicroBatch(replica, index) for replica in range(2) for index in range(3)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ops", (SPLIT, FUSED), ids=("F, I, W", "F, B"))
def test_bf16_gradients_are_added_in_fp32_one_micro_batch_at_a_time(place, ops):
    """... also where several are between I and W, and the LayerNorms' are made in I."""
    runner, alone, rounded = Runner(place, bf16=True), [], None
    for micro_batch in BATCH:
        one = Runner(place, bf16=True)
        run_all(one, [micro_batch], ops)
        assert same(one.gradients(), [gradient.bfloat16().float() for gradient in one.gradients()]), (
            "more than bf16's digits"
        )
        alone.append(one.gradients())
        rounded = (
            one.gradients()
            if rounded is None
            else [(a + b).bfloat16().float() for a, b in zip(rounded, one.gradients())]
        )
    for op in ops:
        for micro_batch in BATCH:
            runner.run(op, micro_batch)
    expected = [sum(each[1:], each[0]) for each in zip(*alone)]
    assert same(runner.gradients(), expected) and not same(expected, rounded)
    assert all(parameter.dtype is torch.bfloat16 and parameter.grad is None for parameter in runner.module.parameters())


def test_bare_work_in_bf16_changes_no_sum():
    runner = Runner("middle", bf16=True)
    run_all(runner, BATCH[:2], SPLIT)
    with no_gradient_changes(runner):
        runner.run(Op.F, BATCH[2], boundary_only=True)
        runner.run(Op.F, BATCH[2])
        runner.run(Op.I, BATCH[2], boundary_only=True)
    assert all(parameter.grad is None for parameter in runner.module.parameters())


# --- exact mode: sums of blocks ---------------------------------------------------------------------

OWN, TAKEN = [MicroBatch(0, index) for index in range(4)], [MicroBatch(1, index) for index in range(4)]


def total(runner: Runner) -> torch.Tensor:
    owners = runner.blocks.owners(Alone())
    return runner.blocks.total(list(range(len(runner.parameters))), owners, Alone())


def run_all(runner: Runner, micro_batches: list[MicroBatch], ops) -> None:
    for micro_batch in micro_batches:
        for op in ops:
            runner.run(op, micro_batch)


@pytest.mark.parametrize("place, reentrant", [*((place, None) for place in PLACES), ("middle", True)])
@pytest.mark.parametrize("ops", (SPLIT, FUSED), ids=("F, I, W", "F, B"))
@pytest.mark.parametrize("bf16", (False, True), ids=("fp32", "bf16"))
def test_the_sum_of_blocks_has_the_same_bits_however_their_work_interleaves(place, ops, reentrant, bf16):
    """The two halves of each replica's four micro-batches are blocks.

    LayerNorms, which are not split, are run out of order.
    """
    plain, mixed = (Runner(place, ops is SPLIT, reentrant, 2, bf16) for _ in range(2))
    run_all(plain, OWN + TAKEN, ops)
    turns = [micro_batch for pair in zip(TAKEN, OWN) for micro_batch in pair]
    if ops is SPLIT:
        for op in (Op.F, Op.I):
            for micro_batch in reversed(turns):
                mixed.run(op, micro_batch)
        for micro_batch in turns:
            mixed.run(Op.W, micro_batch)
    else:
        run_all(mixed, turns, ops)
    assert torch.equal(total(mixed), total(plain)) and total(plain).abs().sum() > 0
    assert all(gradient is None for gradient in mixed.gradients())


def test_the_sum_of_blocks_is_that_of_parameter_grad_up_to_roundings():
    exact, other = Runner("middle", block=2), Runner("middle")
    run_all(exact, OWN + TAKEN, SPLIT), run_all(other, OWN + TAKEN, SPLIT)
    flat = torch.cat([gradient.view(-1) for gradient in other.gradients()])
    assert torch.allclose(total(exact), flat, rtol=1e-5, atol=1e-6) and not torch.equal(total(exact), flat)


@pytest.mark.parametrize("ops", (SPLIT, FUSED), ids=("F, I, W", "F, B"))
def test_a_weight_gradient_out_of_its_blocks_turn_is_refused(ops):
    runner = Runner("last", ops is SPLIT, block=2)
    with pytest.raises(AssertionError, match=r"micro-batch 0\.1 is not in its turn: its block has 0 so far"):
        run_all(runner, [OWN[1]], ops)


def test_bare_work_in_exact_mode_leaves_the_sums_as_they_are():
    full, runner = Runner("middle", block=2), Runner("middle", block=2)
    run_all(full, OWN + TAKEN, SPLIT), run_all(runner, OWN[:1], SPLIT)
    made, kept = runner.run(Op.F, OWN[0], boundary_only=True), runner.run(Op.F, OWN[0])
    assert same(made, kept)
    runner.run(Op.I, OWN[0], boundary_only=True)
    run_all(runner, OWN[1:] + TAKEN, SPLIT)
    assert torch.equal(total(runner), total(full))


def test_a_missing_or_unfinished_block_is_an_error():
    runner = Runner("middle", block=2)
    run_all(runner, OWN + TAKEN[:3], SPLIT)
    with pytest.raises(RecycleError, match=r"the block of micro-batches 1\.2 to 1\.3 has \[1\] weight gradients"):
        total(runner)
    run_all(runner, TAKEN[3:], SPLIT)
    assert total(runner).isfinite().all()
    runner.stage.summed(STEP)
    with pytest.raises(RecycleError, match=r"the block of micro-batches 0\.0 to 0\.1 has \[0\]"):
        total(runner)


def test_a_scaled_loss_has_a_wider_range_than_fp16():
    """The loss in fp16 times its scale would be infinite; the gradients are not, and are stock's."""
    scale, ones = 2.0**15, torch.ones(4, WIDTH, dtype=torch.float16)
    module = nn.Linear(WIDTH, WIDTH).half()
    masters = Masters(module.parameters())
    model = StageModel(module, nn.functional.mse_loss, 2, first=True, last=True, device=CPU)
    stage = Stage(model, None, lambda micro_batch, step, half: nullcontext(), masters=masters)
    stage.loss_scale = scale
    _, stash, loss = stage.forward((STEP, FIRST), LoadedBatch(ones, 8 * ones), ())
    stage.backward((STEP, FIRST), stash, None)
    assert loss.dtype is torch.float16 and loss.isfinite() and (loss / 2 * scale).isinf()
    expected = nn.functional.mse_loss(module(ones), 8 * ones)
    ((expected / 2).float() * scale).backward()
    for weight, master in zip(masters.weights, masters.parameters):
        assert master.grad.isfinite().all() and master.grad.any() and torch.equal(master.grad, weight.grad.float())
