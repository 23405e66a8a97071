"""All that a step changes: handed to another worker bit for bit, taken back, and hashed; and that nothing is left out
of it.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.support.whole_stage import OPTIMIZERS, Standing, Worker, without

pytest.importorskip("deepspeed")

from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import bytes_of
from recycle_plugin.runtime.state.stage_state import OptimizerState, StageState, StatePart, marks, of_parameters, raw
from recycle_plugin.runtime.state.undo import KINDS
from recycle_plugin.runtime.state.units import StageUnits, UnitValue
from tests.support.optimizers import same
from tests.support.optimizers import stage_state as of_list

PARTS = {False: {"weights", "optimizer", "scheduler", "loss_scale", "counters", "places"}}  # by whether it is in bf16
PARTS[True] = PARTS[False] | {"masters"}
FORGOTTEN = [
    pytest.param(name, bf16, id=f"{name}, {'bf16' if bf16 else 'fp32'}")
    for bf16, parts in PARTS.items()
    for name in sorted(parts)
]


def fill(target: StageUnits, source: StageUnits) -> None:
    head, weights = pickle.loads(pickle.dumps(source.head()))
    target.fill(head)
    for name in weights:
        target.write(name, UnitValue(*pickle.loads(pickle.dumps(source.read(name, rest=True)[:3]))))


def units(state: StageState) -> StageUnits:
    return StageUnits(state, {str(place): one for place, one in enumerate(state.optimizer.parameters().values())}, None)


def differing(one: dict, other: dict) -> set[str]:
    return {name for name in one if not same(one[name], other[name])}


# --- handed over ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", (False, True), ids=("fp32", "bf16"))
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("done, before", ((3, 0), (3, 2), (0, 0), (0, 2)))
def test_another_worker_goes_on_with_the_same_bits(kind, bf16, done, before):
    """``done`` steps of the one; the other has other weights, and has done ``before``."""
    source, target = Worker(kind, 0, bf16).steps(*range(done)), Worker(kind, 1, bf16).steps(*range(7, 7 + before))
    source.iterator.stands, target.iterator.stands = Place(1, 5), Place(1, 6)
    fill(target.units, source.units)
    assert not differing(target.found(), source.found()) and target.state.digest() == source.state.digest()
    assert target.iterator.stands == (1, 6), "its data is its own"
    assert not differing(target.steps(20).found(), source.steps(20).found())


@pytest.mark.parametrize("forgotten, bf16", [each for each in FORGOTTEN if each.values[0] != "optimizer"])
def test_a_forgotten_part_would_show(forgotten, bf16):
    """But the optimizer's, which is no part among others to who hands units over."""
    source, target = Worker(bf16=bf16).steps(0, 1, 2), Worker(seed=1, bf16=bf16)
    assert set(source.state.parts) == PARTS[bf16] | {"iterator", "attributes"}
    without(target.state, forgotten), without(source.state, forgotten)
    fill(target.units, source.units)
    assert forgotten in differing(target.found(), source.found())


# --- taken back and hashed --------------------------------------------------------------------------


def taken_back(worker: Worker) -> tuple[set[str], set[str]]:
    """What a step changes, and what of that stays changed once it is taken back."""
    undo, before = KINDS["snapshot"](worker.state), worker.found()
    undo.before_step()
    worker.step(2)
    worker.iterator.stands = Place(1, 3)
    changed = differing(worker.found(), before)
    undo.restore()
    return changed, differing(worker.found(), before)


@pytest.mark.parametrize("bf16", (False, True), ids=("fp32", "bf16"))
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_is_taken_back(kind, bf16):
    worker = Worker(kind, bf16=bf16).steps(0, 1)
    assert taken_back(worker) == (PARTS[bf16], set()) and worker.iterator.stands == (1, 3), "what was drawn stays drawn"


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
    other.iterator.stands = Place(1, 4)
    one.engine.lr_scheduler.last_epoch = other.engine.lr_scheduler.last_epoch = object()
    one.engine.lr_scheduler.extra, other.engine.lr_scheduler.extra = object(), object()
    assert one.state.digest() == other.state.digest()
    other.engine.lr_scheduler.extra = Standing()
    assert one.state.digest() != other.state.digest()


WRITES: dict[str, Callable[[torch.nn.Parameter, torch.optim.Optimizer], object]] = {
    "weights/0": lambda weight, adam: weight.data.clamp_(-0.5, 0.5),
    "weights/0, in another order": lambda weight, adam: weight.data.copy_(weight.data.roll(1, 0)),
    "weights/0, past torch": lambda weight, adam: weight.detach().numpy().__setitem__((2999, 0), 7.0),
    "optimizer/0/exp_avg": lambda weight, adam: adam.state[weight]["exp_avg"].zero_(),
    "optimizer/0/exp_avg_sq": lambda weight, adam: adam.state[weight].pop("exp_avg_sq"),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_a_script_changes_between_steps_is_seen_however_it_does_so(write):
    weight = torch.nn.Parameter(torch.randn(3000, 1, generator=torch.Generator().manual_seed(0)))
    adam = torch.optim.Adam([weight])
    weight.grad = torch.ones_like(weight)
    adam.step()
    state = of_list([weight], adam)
    assert state.changed() is None, "nobody has watched"
    state.watch()
    assert state.changed() == set() and state.watches
    state.touched()
    assert state.changed() == set() and not state.watches
    WRITES[write](weight, adam)
    assert write.partition(",")[0] in (changed := state.changed()) and len(changed) <= 2
    units = StageUnits(state, {"0": weight}, SimpleNamespace())
    assert units.changed(["0"]) == ["0"] and units.changed([]) == []


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
        called = {parameter: name for name, parameter in parameters.items()}
        return StageState(lambda: 3, OptimizerState(optimizer, called), parts)

    assert made("abc", 1).digest() == made("cab", -1).digest()


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128)
SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), min_size=1, max_size=4)


def strided(shape: tuple[int, ...], dtype: torch.dtype, turned: bool, generator: torch.Generator) -> torch.nn.Parameter:
    """With its dimensions in memory the other way round, if ``turned``."""
    tensor = torch.randn(shape[::-1] if turned else shape, dtype=dtype, generator=generator)
    return torch.nn.Parameter(tensor.permute(tuple(range(len(shape)))[::-1]) if turned else tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_lone_number_is_read_whatever_its_stride(dtype):
    """As of x[:, 0] in a batch of one."""
    numbers = torch.arange(4.0).to(dtype)
    for one in (numbers[1::2][:1], numbers.view(2, 2)[:1].t()[1:], numbers[1]):
        assert bytes_of(one).tolist() == numbers[1:2].view(torch.uint8).tolist() == raw(one).tolist()
        assert marks({"": one}) == marks({"": numbers[1:2]})


@given(
    shapes=SHAPES,
    dtype=st.sampled_from(DTYPES),
    turned=st.tuples(st.booleans(), st.booleans()),
    steps=st.integers(0, 2),
)
@hypothesis_settings(max_examples=60)
def test_any_tensors_go_over(shapes, dtype, turned, steps):
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
        states.append(of_list(parameters, optimizer)), lists.append((parameters, optimizer))
    source, target = states
    fill(units(target), units(source))
    (mine, my_optimizer), (theirs, their_optimizer) = lists[1], lists[0]
    assert same([one.data for one in mine], [one.data for one in theirs])
    assert same(my_optimizer.state_dict(), their_optimizer.state_dict())
    assert target.digest() == source.digest()


def test_parameters_beside_the_models_are_the_optimizers():
    """As of optimizers that step copies in another precision."""

    def made(value: float) -> tuple[StageState, torch.Tensor]:
        mine, copied = torch.nn.Parameter(torch.full((3,), value)), torch.full((3,), value, dtype=torch.float64)
        optimizer = torch.optim.SGD([mine, copied], lr=0.1, momentum=0.9)
        optimizer.state[copied]["momentum_buffer"] = copied + 1
        weights = of_parameters("weights", {"mine": mine})
        return StageState(lambda: 0, OptimizerState(optimizer, {mine: "mine"}), [weights]), copied

    (source, _), (target, copied) = made(1.0), made(2.0)
    assert list(source.tensors()) == ["optimizer/0.1", "optimizer/0.1/momentum_buffer", "weights/mine"]
    fill(StageUnits(target, {}, None), StageUnits(source, {}, None))
    assert torch.equal(copied, torch.ones(3, dtype=torch.float64)) and target.digest() == source.digest()


def test_a_checkpoint_of_other_groups_is_refused_in_one_line():
    one, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    saved = of_list([one, other], torch.optim.Adam([one, other]))
    state = of_list([one, other], torch.optim.Adam([{"params": [one]}, {"params": [other]}]))
    with pytest.raises(RecycleError, match="the optimizer has 2 parameter groups here, and 1 in the checkpoint"):
        state.put(saved.small())


def test_room_is_made_where_the_parameter_is_or_in_host_memory():
    parameter = torch.nn.Parameter(torch.ones(2, 3, device="meta"))
    state = of_list([parameter], torch.optim.Adam([parameter]))
    forms = {
        "exp_avg": ("tensor", torch.float32, torch.Size([2, 3]), False),
        "step": ("tensor", torch.float32, torch.Size([]), True),
        "rows": ("tensor", torch.int64, torch.Size([2]), False),
    }
    state.put({"optimizer": {"state": {"0": forms}, **state.optimizer.shared()}})
    made = state.optimizer.optimizer.state[parameter]
    assert {kind: (one.device.type, one.dtype, tuple(one.shape)) for kind, one in made.items()} == {
        "exp_avg": ("meta", torch.float32, (2, 3)),
        "step": ("cpu", torch.float32, ()),
        "rows": ("meta", torch.int64, (2,)),
    }
    with pytest.raises(RecycleError, match="optimizer/5/exp_avg is no tensor of this worker's state"):
        state.fill({"optimizer/5/exp_avg": torch.ones(2, 3)})
