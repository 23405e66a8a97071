"""All that a step changes: handed to another worker bit for bit, followed while training goes on, taken back, and
hashed; and that nothing is left out of it.
"""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

pytest.importorskip("deepspeed")

from recycle_plugin.adapters.deepspeed.bf16 import MasterOptimizer
from recycle_plugin.adapters.deepspeed.ports import COUNTERS, StockOptimizer, counters_part, loss_scaler
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.masters import Masters
from recycle_plugin.runtime.state.stage_state import (
    Chunk,
    Filling,
    OptimizerState,
    StageState,
    StatePart,
    TensorForm,
    of_parameters,
)
from recycle_plugin.runtime.state.undo import KINDS
from recycle_plugin.runtime.worker.changed_state import scheduler_part, stage_state
from recycle_plugin.runtime.worker.scaling import LossScale
from tests.support.optimizers import Make, same
from tests.support.optimizers import stage_state as of_list

OPTIMIZERS: dict[str, Make] = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
}
SCALING = SimpleNamespace(
    loss_scale=0,
    initial_scale_power=8,
    loss_scale_window=2,
    hysteresis=1,
    consecutive_hysteresis=False,
    min_loss_scale=1.0,
)
PARTS = {False: {"weights", "optimizer", "scheduler", "loss_scale", "counters", "places"}}  # by whether it is in bf16
PARTS[True] = PARTS[False] | {"masters"}
FORGOTTEN = [
    pytest.param(name, bf16, id=f"{name}, {'bf16' if bf16 else 'fp32'}")
    for bf16, parts in PARTS.items()
    for name in sorted(parts)
]


class Worker:
    """A stage on an engine like DeepSpeed's, with a weight that two layers share, a frozen layer, a scheduler and a
    loss scale.  Another ``seed``, other weights.
    """

    def __init__(self, kind: str = "adam", seed: int = 0, bf16: bool = False, seat: str = "0.0") -> None:
        torch.manual_seed(seed)
        first, last, frozen = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(2, 2).requires_grad_(False)
        last.weight = first.weight
        self.module = torch.nn.ModuleDict({"0": first, "1": frozen, "2": last}).to(
            torch.bfloat16 if bf16 else torch.float32
        )
        optimizer = OPTIMIZERS[kind](list(self.module.parameters()))
        masters = Masters(one for one in self.module.parameters() if one.requires_grad) if bf16 else None
        self.trained = masters.parameters if bf16 else [one for one in self.module.parameters() if one.requires_grad]
        self.stock = MasterOptimizer(optimizer, masters, lambda: None) if bf16 else optimizer
        self.scale, self.cursor = LossScale(loss_scaler(SCALING)), DataCursor(2)
        self.stage = SimpleNamespace(loss_scale=self.scale.value)
        self.engine = SimpleNamespace(masters=masters, basic_optimizer=optimizer, **dict.fromkeys(COUNTERS, 0))
        self.engine.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        self.iterator = Standing()
        framework = SimpleNamespace(
            seat=seat,
            model=SimpleNamespace(module=self.module),
            optimizer=StockOptimizer(self.engine, self.stock.step),
            masters=masters,
            cursor=self.cursor,
            state=(scheduler_part(lambda: self.engine.lr_scheduler), counters_part(self.engine)),
        )
        self.state = stage_state(framework, self.stage, self.scale, self.iterator)

    def step(self, seed: int) -> None:
        """With random gradients, and what else comes with a step."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.trained:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        self.stock.step()
        self.engine.lr_scheduler.step()
        self.engine.global_steps += 1
        self.engine.global_samples += 8
        self.scale.stepped(False)
        self.stage.loss_scale = self.scale.value
        self.cursor.change(self.engine.global_steps + 1, 2 + seed)

    def steps(self, *seeds: int) -> Worker:
        for seed in seeds:
            self.step(seed)
        return self

    def found(self) -> dict:
        """All of it, past StageState."""
        engine = self.engine
        masters = [] if engine.masters is None else engine.masters.parameters
        found = {
            "weights": {name: one for name, one in self.module.named_parameters() if one.requires_grad},
            "masters": masters,
            "optimizer": engine.basic_optimizer.state_dict(),
            "scheduler": engine.lr_scheduler.state_dict(),
            "loss_scale": [self.scale.state(), self.stage.loss_scale],
            "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps],
            "places": [self.cursor.before(step) for step in range(9)],
        }
        return copy.deepcopy(
            {name: [one.detach() for one in part] if name == "masters" else part for name, part in found.items()}
        )


class Standing:
    """Where an iterator stands."""

    def __init__(self) -> None:
        self.read = 0

    def batches_read(self) -> int:
        return self.read

    def skip_to(self, read: int) -> None:
        self.read = read


def fill(target: StageState, source: StageState) -> None:
    """As between two processes."""
    filling = Filling(target, pickle.loads(pickle.dumps(source.head())))
    for chunk in source.chunks():
        filling.add(pickle.loads(pickle.dumps(chunk)))
    filling.finish()


def without(state: StageState, forgotten: str) -> StageState:
    """A list of parts from which one was forgotten."""
    state._parts = {name: part for name, part in state._parts.items() if name != forgotten}
    return state


def differing(one: dict, other: dict) -> set[str]:
    return {name for name in one if not same(one[name], other[name])}


# --- handed over ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", (False, True), ids=("fp32", "bf16"))
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("done, before", ((3, 0), (3, 2), (0, 0), (0, 2)))
def test_another_worker_goes_on_with_the_same_bits(kind, bf16, done, before):
    """``done`` steps of the one; the other has other weights, and has done ``before``."""
    source, target = Worker(kind, 0, bf16).steps(*range(done)), Worker(kind, 1, bf16).steps(*range(7, 7 + before))
    source.iterator.read, target.iterator.read = 5, 6
    fill(target.state, source.state)
    assert not differing(target.found(), source.found()) and target.state.digest() == source.state.digest()
    assert target.iterator.read == 6, "its data is its own"
    assert not differing(target.steps(20).found(), source.steps(20).found())


@pytest.mark.parametrize("forgotten, bf16", FORGOTTEN)
def test_a_forgotten_part_would_show(forgotten, bf16):
    source, target = Worker(bf16=bf16).steps(0, 1, 2), Worker(seed=1, bf16=bf16)
    assert set(source.state._parts) == PARTS[bf16] | {"iterator"}
    fill(without(target.state, forgotten), without(source.state, forgotten))
    assert forgotten in differing(target.found(), source.found())


# --- taken back and hashed --------------------------------------------------------------------------


def taken_back(worker: Worker) -> tuple[set[str], set[str]]:
    """What a step changes, and what of that stays changed once it is taken back."""
    undo, before = KINDS["snapshot"](worker.state), worker.found()
    undo.before_step()
    worker.step(2)
    worker.iterator.read = 3
    changed = differing(worker.found(), before)
    undo.restore()
    return changed, differing(worker.found(), before)


@pytest.mark.parametrize("bf16", (False, True), ids=("fp32", "bf16"))
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_is_taken_back(kind, bf16):
    worker = Worker(kind, bf16=bf16).steps(0, 1)
    assert taken_back(worker) == (PARTS[bf16], set()) and worker.iterator.read == 3, "what was drawn stays drawn"


@pytest.mark.parametrize("forgotten, bf16", FORGOTTEN)
def test_but_for_a_forgotten_part(forgotten, bf16):
    worker = Worker(bf16=bf16).steps(0, 1)
    without(worker.state, forgotten)
    assert forgotten in taken_back(worker)[1]


def turn_a_bit(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.uint8)[0] ^= 1


CHANGES: dict[str, Callable[[Worker], object]] = {
    "weights": lambda worker: turn_a_bit(worker.module["2"].bias),
    "a moment": lambda worker: turn_a_bit(worker.engine.basic_optimizer.state[worker.trained[0]]["exp_avg_sq"]),
    "a count of steps": lambda worker: worker.engine.basic_optimizer.state[worker.trained[0]]["step"].add_(1),
    "a moment that is gone": lambda worker: worker.engine.basic_optimizer.state[worker.trained[0]].pop("exp_avg"),
    "a moment's form": lambda worker: worker.engine.basic_optimizer.state[worker.trained[0]]["exp_avg"].unsqueeze_(0),
    "a learning rate": lambda worker: worker.engine.basic_optimizer.param_groups[0].update(lr=0.0025000001),
    "scheduler": lambda worker: setattr(worker.engine.lr_scheduler, "last_epoch", 3),
    "loss scale": lambda worker: worker.scale.stepped(False),
    "counters": lambda worker: setattr(worker.engine, "skipped_steps", 1),
    "places": lambda worker: worker.cursor.change(9, 9),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_is_of_every_part(change):
    one, other = Worker().steps(0, 1), Worker().steps(0, 1)
    assert one.state.digest() == other.state.digest()
    CHANGES[change](other)
    assert one.state.digest() != other.state.digest()


def test_the_hash_is_not_of_what_replicas_differ_in():
    """An iterator's place; and of an object that prints its address, all but its class."""
    one, other = Worker().steps(0), Worker().steps(0)
    other.iterator.read = 4
    one.engine.lr_scheduler.last_epoch = other.engine.lr_scheduler.last_epoch = object()
    one.engine.lr_scheduler.extra, other.engine.lr_scheduler.extra = object(), object()
    assert one.state.digest() == other.state.digest()
    other.engine.lr_scheduler.extra = Standing()
    assert one.state.digest() != other.state.digest()


# --- followed ---------------------------------------------------------------------------------------


def test_what_is_read_before_a_step_is_stale_after_it():
    source, target = Worker().steps(0, 1), Worker(seed=1)
    source.state._chunk_bytes = 16
    filling, reader = Filling(target.state, source.state.head()), source.state.chunks()
    early = [next(reader) for _ in range(5)]
    source.step(2)
    late = list(reader)
    assert [{chunk.version.step for chunk in some} for some in (early, late)] == [{2}, {3}]
    for chunk in early + late:
        filling.add(chunk)
    head = source.state.head()
    filling.follow(head)
    assert filling.stale() == [(chunk.name, chunk.offset) for chunk in early]
    with pytest.raises(
        RecycleError,
        match=f"chunk {early[0].name} at byte 0 is of step 2 before the state was last changed, and 5 chunks have to "
        "be read",
    ):
        filling.finish()
    for chunk in source.state.chunks(filling.stale()):
        filling.add(chunk)
    filling.finish()
    assert not differing(target.found(), source.found())


def test_what_is_read_of_a_step_that_is_taken_back_is_stale_when_its_number_comes_again():
    source, target = Worker().steps(0), Worker(seed=1)
    undo = KINDS["snapshot"](source.state)
    undo.before_step()
    source.step(1)
    filling, rejected = Filling(target.state, source.state.head()), list(source.state.chunks())
    undo.restore()
    source.step(2)
    for chunk in rejected:
        filling.add(chunk)
    assert not filling.stale()
    filling.follow(source.state.head())
    assert {chunk.version.step for chunk in rejected} == {source.state.version.step}
    assert len(filling.stale()) == len(rejected)


def test_tensors_that_a_step_has_made_are_read_once_they_are_in_the_head():
    source, target = Worker(), Worker(seed=1)
    filling = Filling(target.state, source.state.head())
    source.step(0)
    filling.follow(source.state.head())
    assert {name.rpartition("/")[2] for name, _ in filling.stale()} >= {"exp_avg", "exp_avg_sq", "step"}
    for chunk in source.state.chunks(filling.stale()):
        filling.add(chunk)
    filling.finish()
    assert not differing(target.found(), source.found())


def test_tensors_that_are_gone_are_left_out():
    source = Worker()
    undo = KINDS["snapshot"](source.state)
    undo.before_step()
    source.step(0)
    spans = source.state.head().spans()
    undo.restore()
    assert {chunk.name.partition("/")[0] for chunk in source.state.chunks(spans)} == {"weights"}


def test_chunks_come_from_several_workers_of_the_stage():
    """Who has taken a step back on the way has the same state as who has not."""
    one, other, target = Worker(seat="0.0").steps(0), Worker(seat="1.0").steps(0), Worker(seed=1)
    undo = KINDS["snapshot"](other.state)
    undo.before_step()
    other.step(9)
    undo.restore()
    one.step(1), other.step(1)
    filling = Filling(target.state, one.state.head())
    for number, (mine, theirs) in enumerate(zip(one.state.chunks(), other.state.chunks(), strict=True)):
        filling.add(theirs if number % 2 else mine)
    assert filling.stale() == list(one.state.head().spans()[1::2]), "whose version nobody has told"
    filling.follow(other.state.head())
    filling.finish()
    assert not differing(target.found(), one.found())


def test_workers_that_differ_are_not_mixed():
    one, other, target = Worker(seat="0.0").steps(0), Worker(seat="1.0").steps(0), Worker(seed=1)
    other.engine.skipped_steps = 1
    filling = Filling(target.state, one.state.head())
    with pytest.raises(
        RecycleError,
        match="workers 0.0 and 1.0 have different states of their stage at step 1; recycle.check_replicas finds who is "
        "wrong",
    ):
        filling.follow(other.state.head())


# --- refused ----------------------------------------------------------------------------------------


WRONG: dict[str, tuple[Callable[[Chunk], Chunk], str]] = {
    "a bit": (
        lambda chunk: replace(chunk, data=bytes([chunk.data[0] ^ 1]) + chunk.data[1:]),
        "does not have the hash that it was sent with",
    ),
    "a step": (
        lambda chunk: replace(chunk, version=chunk.version._replace(step=7)),
        "does not have the hash that it was sent with",
    ),
    "a name": (lambda chunk: replace(chunk, name="weights/2.bias"), "does not have the hash that it was sent with"),
    "half of it": (lambda chunk: replace(chunk, data=chunk.data[:4]), "does not have the hash that it was sent with"),
    "another tensor": (
        lambda chunk: replace(chunk, name="weights/7.bias"),
        "belongs to no tensor of the stage's state",
    ),
    "another place": (lambda chunk: replace(chunk, offset=8), "belongs to no tensor of the stage's state"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_chunk_is_refused_by_name(mistake):
    source, target = Worker().steps(0), Worker(seed=1)
    filling = Filling(target.state, source.state.head())
    change, said = WRONG[mistake]
    wrong = change(next(chunk for chunk in source.state.chunks() if chunk.name == "weights/0.bias"))
    with pytest.raises(
        RecycleError, match=f"^chunk {wrong.name} at byte {wrong.offset}, step {wrong.version.step} {said}"
    ):
        filling.add(wrong)


def test_a_chunk_of_other_size_is_refused():
    source, target = Worker().steps(0), Worker(seed=1)
    filling = Filling(target.state, source.state.head())
    source.state._chunk_bytes = 16
    with pytest.raises(
        RecycleError,
        match="^chunk optimizer/0.weight/exp_avg at byte 0, step 1 has 16 bytes instead of 36: it was cut off",
    ):
        filling.add(next(source.state.chunks([("optimizer/0.weight/exp_avg", 0)])))


def test_a_missing_chunk_is_refused_by_name():
    source, target = Worker().steps(0), Worker(seed=1)
    filling = Filling(target.state, source.state.head())
    for chunk in source.state.chunks():
        if chunk.name != "weights/2.bias":
            filling.add(chunk)
    with pytest.raises(
        RecycleError,
        match="^chunk weights/2.bias at byte 0 is missing, and 1 chunks have to be read for the state to be of step 1",
    ):
        filling.finish()


def test_another_model_is_refused_by_name():
    shapes = {"one": [(3,), (2, 2)], "more": [(3,), (2, 2), (1,)], "other": [(3,), (4,)]}
    states = {
        name: of_list(made := [torch.nn.Parameter(torch.ones(shape)) for shape in each], torch.optim.SGD(made, lr=0.1))
        for name, each in shapes.items()
    }
    with pytest.raises(
        RecycleError, match=r"weights/1 of the stage's state is float32\[2, 2\] here and float32\[4\] there"
    ):
        Filling(states["one"], states["other"].head())
    with pytest.raises(RecycleError, match="weights/2 is no tensor of this worker's state"):
        Filling(states["one"], states["more"].head())
    with pytest.raises(RecycleError, match=r"weights/2 of the stage's state is float32\[1\] here and not there"):
        Filling(states["more"], states["one"].head())


def test_another_job_and_a_changed_head_are_refused():
    one, other = Worker(), Worker()
    without(other.state, "scheduler")
    with pytest.raises(RecycleError, match="scheduler is missing in the other worker's state"):
        Filling(one.state, other.state.head())
    with pytest.raises(RecycleError, match="scheduler is no part of this worker's state that goes by value"):
        Filling(other.state, one.state.head())
    head = one.state.head()
    head.small["counters"]["global_samples"] = 3
    with pytest.raises(RecycleError, match="the head of the stage's state at step 0 does not have the hash"):
        Filling(Worker().state, head)


def test_chunks_that_cut_numbers_in_two_are_refused():
    with pytest.raises(ValueError, match="chunk_bytes is 24, which cuts numbers in two: give a multiple of 16"):
        StageState("0.0", lambda: 0, OptimizerState(torch.optim.SGD([torch.ones(1)], lr=0.1), {}), [], chunk_bytes=24)


# --- tensors of all kinds ---------------------------------------------------------------------------


def test_the_order_is_that_of_the_names_however_it_was_made():
    def made(names: str, order: int) -> StageState:
        torch.manual_seed(0)
        values = {name: torch.randn(5) for name in "abc"}
        parameters = OrderedDict((name, torch.nn.Parameter(values[name].clone())) for name in names)
        optimizer = torch.optim.Adam(parameters.values())
        for name in names:
            state = {"step": torch.tensor(1.0), "exp_avg": values[name] + 1, "exp_avg_sq": values[name] + 2}
            optimizer.state[parameters[name]] = dict(list(state.items())[::order])
        counts = StatePart("counters", get=lambda: dict([("x", 1), ("y", 2)][::order]), set=lambda counts: None)
        parts = [of_parameters("weights", parameters), counts][::order]
        return StageState(
            "0.0",
            lambda: 3,
            OptimizerState(optimizer, {parameter: name for name, parameter in parameters.items()}),
            parts,
            chunk_bytes=16,
        )

    one, other = made("abc", 1), made("cab", -1)
    assert (
        [str(chunk) for chunk in one.chunks()]
        == [str(chunk) for chunk in other.chunks()]
        == sorted(str(chunk) for chunk in one.chunks())
    )
    assert one.digest() == other.digest()


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128)
CHUNKS = (16, 48, 1 << 20)
SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), min_size=1, max_size=4)


def strided(shape: tuple[int, ...], dtype: torch.dtype, turned: bool, generator: torch.Generator) -> torch.nn.Parameter:
    """With its dimensions in memory the other way round, if ``turned``."""
    tensor = torch.randn(shape[::-1] if turned else shape, dtype=dtype, generator=generator)
    return torch.nn.Parameter(tensor.permute(tuple(range(len(shape)))[::-1]) if turned else tensor)


@given(
    shapes=SHAPES,
    dtype=st.sampled_from(DTYPES),
    turned=st.tuples(st.booleans(), st.booleans()),
    chunk=st.sampled_from(CHUNKS),
    steps=st.integers(0, 2),
)
@hypothesis_settings(deadline=None, max_examples=60)
def test_any_tensors_go_over(shapes, dtype, turned, chunk, steps):
    """Of no dimension, of no element, complex; and where they do not lie in memory as their elements are counted, there
    or here.
    """
    states, lists = [], []
    for seed, around in enumerate(turned):
        generator = torch.Generator().manual_seed(seed)
        parameters = [strided(shape, dtype, around, generator) for shape in shapes]
        optimizer = torch.optim.Adam(parameters, foreach=False)
        for _ in range(0 if seed else steps):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, dtype=dtype, generator=generator)
            optimizer.step()
        state = of_list(parameters, optimizer)
        state._chunk_bytes = chunk
        states.append(state), lists.append((parameters, optimizer))
    source, target = states
    chunks = list(source.chunks())
    assert all(0 < len(one.data) <= chunk for one in chunks)
    assert sum(len(one.data) for one in chunks) == sum(tensor.nbytes for tensor in source.tensors().values())
    fill(target, source)
    (mine, my_optimizer), (theirs, their_optimizer) = lists[1], lists[0]
    assert same([one.data for one in mine], [one.data for one in theirs]) and same(
        my_optimizer.state_dict(), their_optimizer.state_dict()
    )
    assert target.digest() == source.digest()


def test_parameters_beside_the_models_are_the_optimizers():
    """As of optimizers that step copies in another precision."""

    def made(value: float) -> tuple[StageState, torch.Tensor]:
        mine, copied = torch.nn.Parameter(torch.full((3,), value)), torch.full((3,), value, dtype=torch.float64)
        optimizer = torch.optim.SGD([mine, copied], lr=0.1, momentum=0.9)
        optimizer.state[copied]["momentum_buffer"] = copied + 1
        return StageState(
            "0.0", lambda: 0, OptimizerState(optimizer, {mine: "mine"}), [of_parameters("weights", {"mine": mine})]
        ), copied

    (source, _), (target, copied) = made(1.0), made(2.0)
    assert list(source.tensors()) == ["optimizer/0.1", "optimizer/0.1/momentum_buffer", "weights/mine"]
    fill(target, source)
    assert torch.equal(copied, torch.ones(3, dtype=torch.float64)) and target.digest() == source.digest()


def test_room_is_made_where_the_parameter_is_or_in_host_memory():
    parameter = torch.nn.Parameter(torch.ones(2, 3, device="meta"))
    state = of_list([parameter], torch.optim.Adam([parameter]))
    for kind, form in {
        "exp_avg": TensorForm(torch.float32, (2, 3), False),
        "step": TensorForm(torch.float32, (), True),
        "rows": TensorForm(torch.int64, (2,), False),
    }.items():
        state.make(f"optimizer/0/{kind}", form)
    made = state.optimizer.optimizer.state[parameter]
    assert {kind: (one.device.type, one.dtype, tuple(one.shape)) for kind, one in made.items()} == {
        "exp_avg": ("meta", torch.float32, (2, 3)),
        "step": ("cpu", torch.float32, ()),
        "rows": ("meta", torch.int64, (2,)),
    }
    with pytest.raises(RecycleError, match="optimizer/5/exp_avg: the optimizer has no parameter 5 here"):
        state.make("optimizer/5/exp_avg", TensorForm(torch.float32, (2, 3), False))
