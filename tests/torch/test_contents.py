"""What objects hold, told and put back: in other processes' terms, to the bit, whatever classes they are made of."""

from __future__ import annotations

import collections
import copy
import io
import itertools
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.two_tensor import TwoTensor

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.rates import ScaledRates
from recycle_plugin.runtime.state.contents import Telling, refusals
from recycle_plugin.runtime.state.putting import MISSING, Putting
from recycle_plugin.runtime.state.stage_state import OptimizerState, as_text
from recycle_plugin.runtime.worker.changed_state import scheduler_part
from recycle_plugin.runtime.worker.stepping import undo_record
from tests.jobs.odd_optimizers import MADE, SCHEDULERS, Lookahead, Mode, Wrapper, adamw
from tests.support.caught_up import caught_up
from tests.support.optimizers import Subject, same, stage_state
from tests.support.stepped_worker import SteppedWorker


def sent(told: Any) -> Any:
    written = io.BytesIO()
    torch.save(told, written)
    return torch.load(io.BytesIO(written.getvalue()), weights_only=True)


class Pair(NamedTuple):
    one: float
    other: Any


VALUES: dict[str, Any] = {
    "float64": np.float64(0.1) / 3,
    "float32": np.float32(0.1),
    "int64": np.int64(2**62 + 1),
    "bool": np.bool_(True),
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "deque": collections.deque([1, np.float64(2.5)], maxlen=3),
    "defaultdict": collections.defaultdict(list, {"a": [1, 2], 3: []}),
    "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("abca"),
    "by numbers": {0: 0.5, (1, 2): "x"},
    "set": {"a", "b", 3},
    "enum": Mode.COLD,
    "named tuple": Pair(0.5, [Mode.WARM]),
    "nested": [{"a": ({"b": np.float32(1)}, None)}, [True, "x", 1j, b"y"]],
    "a class of a number": type("Rate", (float,), {})(0.25),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("there", (False, True), ids=("made", "in place"))
def test_a_value_comes_out_as_it_went_in(name, there):
    value = VALUES[name]
    found = Putting().back(sent(Telling().of(value, "")), copy.deepcopy(value) if there else MISSING)
    assert as_text(Telling().of(found, "")) == as_text(Telling().of(value, ""))
    if name != "a class of a number":
        assert type(found) is type(value) and np.all(found == value)


def test_a_list_of_omegaconf_is_a_list_elsewhere_and_stays_where_it_is():
    omegaconf = pytest.importorskip("omegaconf")
    betas = omegaconf.OmegaConf.create([0.9, 0.999])
    told = sent(Telling().of(betas, ""))
    assert told == [0.9, 0.999] == Putting().back(told) and Putting().back(told, betas) is betas


@pytest.mark.parametrize(
    "made", [lambda: torch.Generator().manual_seed(3), lambda: random.Random(3), lambda: np.random.default_rng(3)]
)
def test_random_numbers_go_on_where_they_were(made):
    def draw(one: Any) -> float:
        return torch.rand((), generator=one).item() if isinstance(one, torch.Generator) else one.random()

    one, other = made(), made()
    draw(one)
    Putting().back(sent(Telling().of(one, "")), other)
    assert draw(one) == draw(other)


def test_cycles_code_and_locks_stay():
    holder = Wrapper(adamw([torch.nn.Parameter(torch.ones(2))]))
    holder.me, holder.lock, holder.code = holder, threading.Lock(), print
    told = Telling().attributes(holder, "")
    assert {told[name] for name in ("me", "lock", "code")} == {("stays",)} and not list(refusals(told))


class Sends(torch.distributed.ProcessGroup):
    """What an optimizer has that sends by itself."""

    def __init__(self) -> None:
        super().__init__(0, 1)


FIELDS = np.zeros(2, [("step", "i8"), ("loss", "f8")])
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an iterator": (lambda: itertools.count(), r"held.where is a itertools.count, whose content can't be read"),
    "a generator": (lambda: (each for each in "ab"), r"held.where is a builtins.generator"),
    "a process group": (Sends, r"held.where is a process group: the optimizer sends to others by itself"),
    "an object of nothing": (object, r"held.where is a builtins.object"),
    "an array with fields": (lambda: FIELDS, r"held.where is a numpy value with fields or a mask"),
    "one value with fields": (lambda: FIELDS[0], r"held.where is a numpy value with fields or a mask"),
    "an array with a mask": (
        lambda: np.ma.masked_equal([1, 2], 2),
        r"held.where is a numpy value with fields or a mask",
    ),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"held.where is a tensor that is sparse or nested"),
    "quantised": (lambda: TwoTensor(torch.ones(2), torch.ones(2)), r"held.where is a TwoTensor, made of other tensors"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_told_is_refused_at_the_start_by_optimizer_key_and_type(what):
    make, said = REFUSED[what]
    parameters = [torch.nn.Parameter(torch.ones(2))]
    optimizer = Wrapper(adamw(parameters))
    optimizer.held = {"where": make()}
    with pytest.raises(RecycleError, match=f"Wrapper: attributes.{said}"):
        stage_state(parameters, optimizer).check()


STOCK = [
    getattr(torch.optim, name)
    for name in dir(torch.optim)
    if isinstance(getattr(torch.optim, name), type) and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
]


@pytest.mark.parametrize(
    "kind", [kind for kind in STOCK if kind is not torch.optim.Optimizer], ids=lambda kind: kind.__name__
)
def test_no_optimizer_of_torchs_is_refused_or_holds_anything_else(kind):
    parameters = [torch.nn.Parameter(torch.ones(2, 3))]
    optimizer = kind(parameters)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = stage_state(parameters, optimizer)
    parameters[0].grad = torch.ones(2, 3).to_sparse() if kind.__name__ == "SparseAdam" else torch.ones(2, 3)
    optimizer.step(lambda: torch.ones(()))
    state.check()
    if kind.__name__ != "LBFGS":  # which counts its numbers once
        assert state.small()["attributes"] is None and not state.optimizer.attributes.tensors()


@pytest.mark.parametrize("name", MADE)
def test_a_step_is_taken_back(name):
    subject = Subject(MADE[name])
    for seed in range(4):
        subject.step(subject.random(seed))
    before, copies = subject.stage_state.digest(), copy.deepcopy(subject.parameters)
    subject.step(subject.random(9))
    assert subject.stage_state.digest() != before
    subject.undo.restore()
    assert subject.stage_state.digest() == before and same(list(subject.parameters), copies)


def test_what_no_step_has_changed_is_the_workers_own():
    """Its rank and device; a clock goes along and is not compared."""
    states, optimizers = [], []
    for rank in range(2):
        parameters = [torch.nn.Parameter(torch.ones(2))]
        optimizer = Wrapper(adamw(parameters))
        optimizer.rank, optimizer.device, optimizer.began, optimizer.count = rank, f"cuda:{rank}", 0.0, 0
        states.append(stage_state(parameters, optimizer)), optimizers.append(optimizer)
    for rank, optimizer in enumerate(optimizers):
        optimizer.began, optimizer.count = 17.5 + rank, 3
    assert states[0].digest() == states[1].digest()
    states[1].put(sent(states[0].small()))
    there = optimizers[1]
    assert (there.rank, there.device, there.began, there.count) == (1, "cuda:1", 17.5, 3)
    there.count = 4
    assert states[0].digest() != states[1].digest()


def test_what_is_elsewhere_is_found_there_again():
    """Parameters, views of them, and tensors of the state, of which the optimizer makes lists in its first step."""

    def made(stepped: bool) -> Any:
        parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        optimizer.held = None
        state = stage_state(parameters, optimizer)
        if stepped:
            for one in parameters:
                one.grad = torch.ones_like(one)
            optimizer.step()
            buffers = [optimizer.state[one]["momentum_buffer"] for one in parameters]
            optimizer.held = [parameters[0], parameters[1].data, buffers]
        return parameters, optimizer, state

    _, _, source = made(True)
    parameters, optimizer, target = made(False)
    assert not source.optimizer.attributes.tensors()
    target.put(sent(source.small()))
    one, view, buffers = optimizer.held
    assert one is parameters[0] and view.data_ptr() == parameters[1].data_ptr()
    assert all(mine is optimizer.state[of]["momentum_buffer"] for mine, of in zip(buffers, parameters, strict=True))


def test_tensors_that_are_parameters_are_not_copied_twice():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    optimizer = Lookahead(adamw(parameters), 5)
    optimizer.data, optimizer.views = [one.data for one in parameters], [parameters[0].view(-1)]
    state = stage_state(parameters, optimizer)
    assert list(state.optimizer.attributes.tensors()) == ["attributes/slow/0/0"]


@pytest.mark.parametrize("kind", ("snapshot", "host_snapshot"))
def test_hooks_run_as_without_a_record(kind):
    """Also where torch calls none, and a scheduler was there before."""
    parameters = [torch.nn.Parameter(torch.ones(2))]
    optimizer = Wrapper(adamw(parameters))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    record = undo_record(kind, stage_state(parameters, optimizer))
    factors = []
    ScaledRates(optimizer, lambda: factors.append(optimizer.param_groups[0]["lr"]) or 0.5)
    parameters[0].grad = torch.ones(2)
    optimizer.step()
    stepped = parameters[0].detach().clone()
    record.restore()
    assert not torch.equal(stepped, parameters[0]) and same(parameters[0].data, torch.ones(2))
    assert factors == [1e-3] and optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("kind", ("snapshot", "host_snapshot"))
@pytest.mark.parametrize("hooked", ("wrapped", "hooked", "all"))
def test_what_a_hook_changes_before_a_step_is_taken_back_with_it(kind, hooked, request):
    """Else the step that is done again has it twice; also a hook of ``all`` optimizers, which torch calls first."""
    parameters = [torch.nn.Parameter(torch.ones(2))]
    optimizer = adamw(parameters) if hooked != "wrapped" else Wrapper(adamw(parameters))

    def decayed(*_: Any) -> None:
        parameters[0].data.mul_(0.5)
        optimizer.param_groups[0]["lr"] *= 0.5

    of_one = (optimizer if hooked == "hooked" else getattr(optimizer, "_base", optimizer)).register_step_pre_hook
    request.addfinalizer((register_optimizer_step_pre_hook if hooked == "all" else of_one)(decayed).remove)
    record = undo_record(kind, stage_state(parameters, optimizer))
    found = []
    for _ in range(2):
        parameters[0].grad = torch.ones(2)
        record.prepare()
        optimizer.step()
        found.append((parameters[0].tolist(), optimizer.param_groups[0]["lr"]))
        record.restore()
    assert found[0] == found[1] and found[0][1] == 5e-4 and same(parameters[0].data, torch.ones(2))


@pytest.mark.parametrize("name", MADE)
def test_a_newcomer_is_filled_and_follows(name):
    caught_up(partial(SteppedWorker, MADE[name], scheduler=SCHEDULERS.get(name)), lambda step: None, 0)


def test_a_wrapped_optimizer_that_would_step_bf16_weights_is_refused():
    pytest.importorskip("deepspeed")
    from recycle_plugin.adapters.deepspeed.bf16 import MasterOptimizer
    from recycle_plugin.runtime.stage.masters import Masters

    weights = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    optimizer = Wrapper(adamw(weights))
    MasterOptimizer(optimizer, Masters(weights), lambda: None)
    optimizer = Wrapper(adamw(weights))
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(RecycleError, match=r"Wrapper._base has parameter groups of its own, whose weights are not"):
        MasterOptimizer(optimizer, Masters(weights), lambda: None)


def test_the_inverse_of_one_with_attributes_is_refused():
    class Averaging(torch.optim.SGD):
        undo_rule = "sgd"

    parameters = [torch.nn.Parameter(torch.ones(2))]
    optimizer = Averaging(parameters, lr=0.1)
    assert undo_record("inverse", stage_state(parameters, optimizer)).exact is False
    optimizer.average = torch.zeros(2)
    with pytest.raises(RecycleError, match="attributes of its own beside the model's"):
        undo_record("inverse", stage_state(parameters, optimizer))


def scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    return optimizer, make(optimizer)


class Counting:
    """A scheduler by an iterator, which its state_dict winds forward."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.rates, self.taken = optimizer, (0.1 / (1 + each) for each in itertools.count()), 0

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] = next(self.rates)
        self.taken += 1

    def state_dict(self) -> dict:
        return {"taken": np.int64(self.taken)}

    def load_state_dict(self, state: dict) -> None:
        while self.taken < state["taken"]:
            self.step()


lrs = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda one: lrs.LambdaLR(one, lambda step: np.cos(step / 9)),
    "MultiplicativeLR": lambda one: lrs.MultiplicativeLR(one, lambda step: np.float32(0.9)),
    "StepLR": lambda one: lrs.StepLR(one, 3),
    "MultiStepLR": lambda one: lrs.MultiStepLR(one, [2, 5, 5]),
    "CosineAnnealingWarmRestarts": lambda one: lrs.CosineAnnealingWarmRestarts(one, 4),
    "CyclicLR": lambda one: lrs.CyclicLR(one, 0.01, 0.2, 3),
    "OneCycleLR": lambda one: lrs.OneCycleLR(one, 0.3, 20),
    "SequentialLR": lambda one: lrs.SequentialLR(one, [lrs.ConstantLR(one), lrs.CosineAnnealingLR(one, 5)], [4]),
    "ChainedScheduler": lambda one: lrs.ChainedScheduler([lrs.ConstantLR(one), lrs.ExponentialLR(one, 0.9)]),
    "SWALR": lambda one: torch.optim.swa_utils.SWALR(one, 0.05),
    "its own": SCHEDULERS["hoarder"],
    "by an iterator": Counting,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_goes_on_elsewhere(name):
    (mine, schedule), (theirs, other) = scheduled(SCHEDULES[name]), scheduled(SCHEDULES[name])
    for _ in range(7):
        mine.step(), schedule.step()
    here, there = (
        scheduler_part(lambda one=one: one, lambda of=of: of) for one, of in ((schedule, mine), (other, theirs))
    )
    told = sent(here.get())
    assert not list(refusals(told)) and as_text(told) == as_text(here.get())
    there.set(told)
    OptimizerState(theirs, {}).set_shared(sent(OptimizerState(mine, {}).shared()))
    for _ in range(9):
        mine.step(), schedule.step(), theirs.step(), other.step()
        assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_an_average_of_the_model_that_the_optimizer_has_comes_along():
    states, optimizers = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        model = torch.nn.Linear(2, 2)
        parameters = list(model.parameters())
        optimizer = Wrapper(adamw(parameters))
        optimizer.model, optimizer.average = model, torch.optim.swa_utils.AveragedModel(model)
        states.append(stage_state(parameters, optimizer)), optimizers.append(optimizer)
    optimizers[0].average.update_parameters(optimizers[0].model)
    states[1].put(sent(states[0].small()))
    states[1].fill(states[0].tensors())
    assert same(*(one.average.state_dict() for one in optimizers)) and states[0].digest() == states[1].digest()
