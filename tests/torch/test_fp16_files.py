"""The optimizer's state and the loss scale of fp16 jobs in files: those of DeepSpeed's own three optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.checkpoint import constants as names

from recycle_plugin.adapters.deepspeed.bf16 import StateFiles
from recycle_plugin.adapters.deepspeed.fp16 import HalfOptimizer
from recycle_plugin.adapters.deepspeed.ports import loss_scaler
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.masters import Masters
from tests.support.optimizers import same
from tests.support.zero_files import MAKE, assert_alike, load, model

SECTION = SimpleNamespace(
    loss_scale=0.0,
    initial_scale_power=10,
    loss_scale_window=2,
    hysteresis=2,
    consecutive_hysteresis=False,
    min_loss_scale=1,
)
COURSE = (
    False,
    False,
    False,
    True,
    False,
    True,
)  # which steps overflow: the scale goes up, costs hysteresis, goes down


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Without process groups DeepSpeed's scaler can't ask for the rank, by which it decides who says what it does."""
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda group=None: 0)


class FusedAdam(torch.optim.Adam):
    """Of the name by which stock takes its FP16_Optimizer."""


def half(seed: int) -> torch.nn.Module:
    return model(seed).half()


def groups(module: torch.nn.Module) -> list[dict]:
    first, scale, second, bias = module.parameters()
    return [{"params": [first, scale], "lr": 0.03}, {"params": [second, bias]}]


class Subject:
    """A model in fp16 under an optimizer that ``make`` has made, with two groups."""

    def __init__(self, make: Callable = MAKE["adam"], seed: int = 0, **section: object) -> None:
        self.module = half(seed)
        self.inner = make(groups(self.module))
        self.masters = Masters(self.module.parameters())
        self.scaler = loss_scaler(SimpleNamespace(**{**vars(SECTION), **section}))
        self.optimizer = HalfOptimizer(self.inner, self.masters, lambda: None, self.scaler, 0.5)
        called = {parameter: name for name, parameter in self.module.named_parameters()}
        self.files = StateFiles(self.inner, self.masters, called, 3, 0.5, scaler=self.scaler)

    def train(self, course: tuple[bool, ...] = COURSE) -> None:
        for seed, overflow in enumerate(course):
            for master, gradient in zip(self.masters.parameters, gradients(seed, self.masters.parameters)):
                master.grad = gradient
            if not overflow:
                self.optimizer.step()
            self.scaler.update_scale(overflow)

    def state(self) -> dict:
        masters = [parameter.data for parameter in self.masters.parameters]
        return copy.deepcopy({"masters": masters, "scale": dict(vars(self.scaler)), **self.inner.state_dict()})


def gradients(seed: int, like: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(each.shape, generator=generator).half().float() for each in like]


# --- stage 0 ----------------------------------------------------------------------------------------


@pytest.fixture
def stock(process_group, monkeypatch):
    """``stock(fused, module, optimizer)``: DeepSpeed's optimizer of stage 0 in a job of one worker."""
    import deepspeed.comm as comm
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    from recycle_plugin.patches import deepspeed_cpu

    deepspeed_cpu.apply()
    comm.init_distributed("gloo")
    scale = {
        "dynamic_loss_scale": True,
        "dynamic_loss_args": {"init_scale": 2**10, "scale_window": 2, "min_scale": 1},
    }

    def make(fused: bool, module: torch.nn.Module) -> Any:
        more = {"timers": None} if fused else {}
        return (FP16_Optimizer if fused else FP16_UnfusedOptimizer)(MAKE["adam"](groups(module)), **scale, **more)

    yield make


def stock_step(theirs: Any, seed: int) -> None:
    for group in theirs.fp16_groups:
        for weight in group:
            weight.grad = torch.zeros_like(weight)
    weights = [weight for group in theirs.fp16_groups for weight in group]
    for weight, gradient in zip(weights, gradients(seed, weights)):
        weight.grad = gradient.half()
    theirs.step()


@pytest.mark.parametrize("fused", (True, False), ids=("FP16_Optimizer", "FP16_UnfusedOptimizer"))
def test_stage_0_reads_what_deepspeed_writes_and_deepspeed_what_it_writes(stock, fused):
    theirs = stock(fused, half(0))
    for seed in range(3):
        stock_step(theirs, seed)
    saved = copy.deepcopy(theirs.state_dict())
    subject = Subject(FusedAdam if fused else MAKE["adam"], seed=5)
    subject.optimizer.load_state_dict(saved)
    mine = subject.optimizer.state_dict()
    assert saved["cur_scale"] == subject.scaler.cur_scale != 2**10 and saved["cur_iter"] == subject.scaler.cur_iter == 3
    assert {key: value for key, value in saved.items() if key in mine}.keys() == saved.keys()
    assert_alike({key: mine[key] for key in saved}, saved | {names.CLIP_GRAD: 0.5} if fused else saved)
    elsewhere = stock(fused, half(7))
    elsewhere.load_state_dict(copy.deepcopy(mine))
    assert_alike(elsewhere.state_dict(), {key: mine[key] for key in saved})


@pytest.mark.parametrize("written", (FusedAdam, MAKE["adam"]))
@pytest.mark.parametrize("read", (FusedAdam, MAKE["adam"]))
def test_either_format_is_read_whole(written, read):
    """The scale's hysteresis too, which stock's format has no place for."""
    one, other = Subject(written), Subject(read, seed=5)
    one.train(), other.train((True, False))
    other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    assert same(other.state(), one.state()) and one.scaler.cur_scale == other.optimizer.loss_scale == 2**10
    one.train(COURSE[:2]), other.train(COURSE[:2])
    assert same(other.state(), one.state())


@pytest.mark.parametrize("make", (FusedAdam, MAKE["adam"]))
def test_another_model_or_kind_of_scale_is_refused(make):
    saved = Subject(make).optimizer.state_dict()
    with pytest.raises(
        RecycleError, match=r"the checkpoint's loss scale is dynamic, and fp16.loss_scale makes this job's static"
    ):
        Subject(loss_scale=64.0).optimizer.load_state_dict(saved)
    groups = next(saved[key] for key in ("fp32_groups", "fp32_groups_flat") if key in saved)
    groups.pop()
    with pytest.raises(RecycleError, match="the checkpoint's parameter groups are not this job's"):
        Subject().optimizer.load_state_dict(saved)


# --- stage 1 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("steps", (0, 6))
@pytest.mark.parametrize("parts", (1, 2, 3, 8))
def test_stage_1_from_files_of_any_number_of_replicas(kind, steps, parts, tmp_path):
    one, other = Subject(MAKE[kind]), Subject(MAKE[kind], seed=5)
    one.train(COURSE[:steps])
    for number in range(parts):
        torch.save(one.files.part(number, parts), tmp_path / one.files.name(number))
    other.train((True, True))
    other.files.read(tmp_path, load)
    assert same(other.state(), one.state())


def test_the_scale_in_a_part_stays_what_it_was():
    """A background checkpoint is written while training goes on."""
    subject = Subject()
    part = subject.files.part(0, 1)[names.OPTIMIZER_STATE_DICT]
    subject.train()
    assert part[names.LOSS_SCALER].cur_iter == 0 and subject.scaler.cur_iter == len(COURSE)


def test_parameters_in_another_order_are_refused(tmp_path):
    subject = Subject()
    part = subject.files.part(0, 1)
    first = part[names.OPTIMIZER_STATE_DICT][names.PARAM_SLICE_MAPPINGS][0]
    first.move_to_end(next(iter(first)))
    torch.save(part, tmp_path / subject.files.name(0))
    with pytest.raises(RecycleError, match=r"has reordered or padded parameters"):
        subject.files.read(tmp_path, load)


def test_another_kind_of_scale_is_refused_at_stage_1(tmp_path):
    static = Subject(loss_scale=64.0)
    torch.save(static.files.part(0, 1), tmp_path / static.files.name(0))
    with pytest.raises(
        RecycleError, match=r"the checkpoint's loss scale is static, and fp16.loss_scale makes this job's dynamic"
    ):
        Subject().files.read(tmp_path, load)
