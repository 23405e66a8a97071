"""The optimizer's state of bf16 jobs in files: those of DeepSpeed's own BF16_Optimizer, cut for and put together from
any number of replicas.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.zero_files import MAKE, assert_alike, load, model

pytest.importorskip("deepspeed")

from deepspeed.checkpoint import constants as names

from recycle_plugin.adapters.deepspeed.bf16 import MasterOptimizer, StateFiles
from recycle_plugin.adapters.deepspeed.checkpoint import check_loadable
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.state.stage_state import OptimizerState, StageState, of_parameters
from recycle_plugin.runtime.state.undo import KINDS
from tests.support.optimizers import same


class Subject:
    """A model in bf16 under ``kind`` of optimizer, with two groups, a frozen parameter among them."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.module = model(seed)
        frozen = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16), requires_grad=False)
        first, scale, second, bias = self.module.parameters()
        self.inner = MAKE[kind]([{"params": [first, frozen, scale], "lr": 0.03}, {"params": [second, bias]}])
        self.masters = Masters(self.module.parameters())
        self.optimizer = MasterOptimizer(self.inner, self.masters, lambda: None)
        self.files = StateFiles(
            self.inner, self.masters, {p: name for name, p in self.module.named_parameters()}, 3, 0.5
        )

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.masters.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer.step()

    def state(self) -> dict:
        state = {
            "weights": self.module.state_dict(),
            "masters": [p.data for p in self.masters.parameters],
            **self.inner.state_dict(),
        }
        return copy.deepcopy(state)

    def stage_state(self) -> StageState:
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        masters = {names[weight]: self.masters.of(weight) for weight in self.masters.weights}
        weights = of_parameters("weights", {name: weight for weight, name in names.items()}, self.masters.round_off)
        return StageState(
            lambda: 0,
            OptimizerState(self.inner, {master: name for name, master in masters.items()}),
            [weights, of_parameters("masters", masters)],
        )

    def save(self, folder: Path, parts: int) -> None:
        for number in range(parts):
            torch.save(self.files.part(number, parts), folder / self.files.name(number))


def test_steps_are_of_the_masters_and_weights_are_rounded():
    subject = Subject("adam")
    before = subject.state()
    subject.step(1)
    for weight, master, old in zip(subject.masters.weights, subject.masters.parameters, before["masters"]):
        assert torch.equal(weight, master.bfloat16()) and not torch.equal(master, old)
        assert not torch.equal(master, master.bfloat16().float()), "a master has no more digits than its weight"


@pytest.mark.parametrize("kind", MAKE)
def test_a_step_that_is_taken_back_leaves_every_bit(kind):
    """The snapshot is of masters and state; weights follow from them."""
    subject = Subject(kind)
    subject.step(1)
    undo = KINDS["snapshot"](subject.stage_state())
    before = subject.state()
    undo.before_step()
    subject.step(2)
    assert not same(subject.state(), before)
    undo.restore()
    assert same(subject.state(), before)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("steps", (0, 2))
@pytest.mark.parametrize("parts", (1, 2, 3, 8))
def test_from_files_of_any_number_of_replicas(kind, steps, parts, tmp_path):
    one, other = Subject(kind), Subject(kind, seed=5)
    for seed in range(steps):
        one.step(seed)
    one.save(tmp_path, parts)
    other.step(7)
    other.files.read(tmp_path, load)
    assert same(other.state(), one.state())
    one.step(9), other.step(9)
    assert same(other.state(), one.state())


def test_weights_alone_make_masters_of_their_precision():
    subject = Subject("sgd")
    subject.step(1)
    subject.module.load_state_dict(model(5).state_dict())
    subject.masters.take_over()
    assert all(
        torch.equal(master, weight.float())
        for weight, master in zip(subject.masters.weights, subject.masters.parameters)
    )


def test_a_missing_part_and_another_model_are_refused(tmp_path):
    subject = Subject("adam")
    subject.step(1)
    subject.save(tmp_path, 3)
    (tmp_path / subject.files.name(1)).rename(tmp_path / "aside")
    with pytest.raises(RecycleError, match=rf"{subject.files.name(1)} is missing, a part of the optimizer's state"):
        subject.files.read(tmp_path, load)
    (tmp_path / "aside").rename(tmp_path / subject.files.name(1))
    module = torch.nn.Linear(3, 3).bfloat16()
    inner, masters = torch.optim.Adam(module.parameters()), Masters(module.parameters())
    MasterOptimizer(inner, masters, lambda: None)
    other = StateFiles(inner, masters, {p: name for name, p in module.named_parameters()}, 3, 0.5)
    with pytest.raises(RecycleError, match=r"has \[13, 8\] numbers in its parameter groups, and this job's has \[12\]"):
        other.read(tmp_path, load)


def test_state_that_belongs_to_no_element_is_refused():
    subject = Subject("adam")
    subject.step(1)
    subject.inner.state[subject.masters.parameters[0]]["exp_avg"] = torch.zeros(3)
    with pytest.raises(RecycleError, match="the optimizer's state 'exp_avg' has other shapes than the parameters"):
        subject.files.part(0, 2)


@pytest.mark.parametrize("without", (0, 1, 2, 3))
def test_state_of_some_parameters_only_is_refused(without):
    """Whichever had no gradient yet. Its state would be taken for one that is there, or the others' be left out."""
    subject = Subject("adam")
    for number, parameter in enumerate(subject.masters.parameters):
        if number != without:
            parameter.grad = torch.ones_like(parameter)
    subject.optimizer.step()
    before = subject.state()
    with pytest.raises(RecycleError, match="^save_checkpoint: the optimizer has state for some parameters of a group"):
        subject.files.part(0, 2)
    assert same(subject.state(), before)
    subject.step(1)
    with pytest.raises(RecycleError, match="the optimizer's state 'step' is not the same for all parameters"):
        subject.files.part(0, 2)


MODELS = ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt")
STATES = {
    "fp32": (),
    "fp16": (),
    "bf16": ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",),
    "ZeRO 1": ("zero_pp_rank_0_mp_rank_00_optim_states.pt",),
}
INSIDE = {"fp32": {"state": {}, "param_groups": []}, "fp16": {"dynamic_loss_scale": True, "fp32_groups": []}}


@pytest.mark.parametrize(
    "saved, precision, sharded, said",
    [
        ("fp32", "fp32", False, None),
        ("bf16", "bf16", False, None),
        ("bf16", "bf16", True, None),
        ("fp16", "fp16", False, None),
        ("ZeRO 1", "fp16", True, None),
        ("bf16", "fp32", False, "is of a job in bf16, and this one is in fp32"),
        ("fp16", "fp32", False, "is of a job in fp16, and this one is in fp32"),
        ("fp32", "bf16", False, "is of a job in fp32, and this one is in bf16"),
        ("fp32", "fp16", False, "is of a job in fp32, and this one is in fp16"),
        ("bf16", "fp16", True, "is of a job in bf16, and this one is in fp16"),
        ("ZeRO 1", "fp32", False, "has the optimizer's state in ZeRO's shards"),
        ("ZeRO 1", "bf16", True, "is of a job in fp16, and this one is in bf16"),
        ("ZeRO 1", "fp16", False, "is of a job at ZeRO stage 1, and this one is at stage 0"),
        ("fp16", "fp16", True, "is of a job at ZeRO stage 0, and this one is at stage 1"),
    ],
)
def test_a_checkpoint_of_another_precision_is_refused(saved, precision, sharded, said, tmp_path):
    for name in MODELS:
        torch.save({"optimizer": INSIDE.get(saved)}, tmp_path / name)
    for name in STATES[saved]:
        (tmp_path / name).touch()
    if said is None:
        check_loadable(tmp_path, 2, precision, sharded)
        with pytest.raises(RecycleError, match="is of 2 pipeline stages, and this job has 3"):
            check_loadable(tmp_path, 3, precision, sharded)
    else:
        with pytest.raises(RecycleError, match=said):
            check_loadable(tmp_path, 2, precision, sharded)


# --- against DeepSpeed's own ------------------------------------------------------------------------


@pytest.fixture
def stock(process_group, monkeypatch):
    """``stock(module, optimizer)``: DeepSpeed's BF16_Optimizer in a job of one worker."""
    import deepspeed.comm as comm
    from deepspeed.runtime import bf16_optimizer

    from recycle_plugin.patches import deepspeed_cpu

    deepspeed_cpu.apply()
    monkeypatch.setattr(bf16_optimizer, "see_memory_usage", lambda *_, **__: None)
    comm.init_distributed("gloo")
    config = SimpleNamespace(enabled=True, immediate_grad_update=False)

    def make(module: torch.nn.Module, optimizer: torch.optim.Optimizer):
        called = {parameter: name for name, parameter in module.named_parameters()}
        group = torch.distributed.group.WORLD
        return bf16_optimizer.BF16_Optimizer(
            optimizer, called, config, clip_grad=0.5, dp_process_group=group, grad_acc_dtype=torch.float32
        )

    yield make


@pytest.mark.parametrize("kind", ("adam", "momentum"))
def test_the_files_are_those_of_deepspeed_itself(stock, kind, tmp_path):
    """The same steps there and here leave the same file, bit for bit; each reads the other's."""
    subject, module = Subject(kind), model(0)
    first, scale, second, bias = module.parameters()
    theirs = stock(module, MAKE[kind]([{"params": [first, scale], "lr": 0.03}, {"params": [second, bias]}]))

    def step(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for group, flags in zip(theirs.fp32_groups_gradients, theirs.fp32_groups_has_gradients):
            for index, gradient in enumerate(group):
                gradient.copy_(torch.randn(gradient.shape, generator=generator))
                flags[index] = True
        theirs.clip_grad = 0.0
        theirs.step()
        theirs.clip_grad = 0.5

    for seed in (1, 2):
        subject.step(seed), step(seed)
    mine = subject.files.part(0, 1)[names.OPTIMIZER_STATE_DICT]
    assert_alike(mine, theirs.state_dict())
    elsewhere = model(5)
    first, scale, second, bias = elsewhere.parameters()
    other = stock(elsewhere, MAKE[kind]([{"params": [first, scale]}, {"params": [second, bias]}]))
    other.load_state_dict([copy.deepcopy(mine)], load_from_fp32_weights=True)
    assert_alike(other.state_dict(), mine)
    torch.save({names.OPTIMIZER_STATE_DICT: theirs.state_dict()}, tmp_path / subject.files.name(0))
    reader = Subject(kind, seed=5)
    reader.files.read(tmp_path, load)
    assert same(reader.state(), subject.state())
