"""A stage's state, filled unit by unit from two workers that go on training meanwhile, and followed by their sums: in
the end, and from then on, it is theirs to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.caught_up import caught_up, compare

pytest.importorskip("deepspeed")

from deepspeed.ops import adam

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.state import units as units_module
from recycle_plugin.runtime.state.stage_state import StatePart, pieces
from tests.support.adam_kernels import use_formulas
from tests.support.optimizers import Make, Restless, same
from tests.support.stepped_worker import SteppedWorker

OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov, foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adam, foreach": lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True),
    "adam, fused": lambda ps: torch.optim.Adam(ps, lr=0.01, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1, amsgrad=True),
    "a rate in a tensor": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.01), foreach=False),
    "two groups": lambda ps: torch.optim.AdamW([{"params": ps[:2], "lr": 0.1}, {"params": ps[2:]}], lr=0.01),
    "restless": lambda ps: Restless(ps, lr=0.1),
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """So that a unit takes several calls."""
    use_formulas(monkeypatch)
    monkeypatch.setattr(units_module, "SLICE_S", 0.0)
    monkeypatch.setattr(units_module, "pieces", partial(pieces, nbytes=48))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_is_followed(kind, seed):
    caught_up(partial(SteppedWorker, OPTIMIZERS[kind]), lambda step: None, seed)


DEEPSPEEDS: dict[str, Make] = {
    "FusedAdam, two groups": lambda ps: adam.FusedAdam([{"params": ps[:2], "lr": 0.1}, {"params": ps[2:]}], lr=0.01),
    "DeepSpeedCPUAdam": lambda ps: adam.DeepSpeedCPUAdam(ps, lr=0.01),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", DEEPSPEEDS)
def test_deepspeeds_own_are_followed(kind, seed):
    """FusedAdam counts in the last parameter of a group for all of them, so a group is one unit."""
    caught_up(partial(SteppedWorker, DEEPSPEEDS[kind]), lambda step: None, seed)


CASES: dict[str, tuple[dict[str, Any], Callable[[int], float | None], bool]] = {
    "bf16": ({"dtype": torch.bfloat16}, lambda step: None, False),
    "fp16, two steps of three skipped": (
        {"dtype": torch.float16, "scaled": True},
        lambda step: 1.0 if step % 3 else float("inf"),
        False,
    ),
    "clipped": ({"clip": 0.5}, lambda step: 0.1 * step, False),
    "clipped once it is applied": ({"clip": 0.5}, lambda step: 0.1 * step, True),
    "skipped once it is applied": (
        {"scaled": True, "clip": 1.0},
        lambda step: (0.5, 3.0, float("nan"))[step % 3],
        True,
    ),
    "tied": ({"tied": True}, lambda step: None, False),
    "tied, clipped, bf16": ({"tied": True, "clip": 0.5, "dtype": torch.bfloat16}, lambda step: 0.1 * step, False),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ("adam", "momentum"))
@pytest.mark.parametrize("case", CASES)
def test_steps_of_all_sorts_are_followed(case, kind, seed):
    how, norms, validated = CASES[case]
    caught_up(partial(SteppedWorker, OPTIMIZERS[kind], **how), norms, seed, validated)


def whole(unit) -> dict:
    return {name: tensor.clone() for name, tensor in unit.tensors.items()}


def test_a_unit_that_was_read_by_half_is_read_anew_once_a_step_has_changed_it():
    worker = SteppedWorker(OPTIMIZERS["adam"])
    worker.train(1)
    assert worker.units.read("0.weight", rest=False) is None
    worker.train(2)
    found = worker.units.read("0.weight", rest=True)
    assert same(whole(found), whole(worker.new_units().read("0.weight", rest=True)))
    assert set(found.tensors) == {"weights/0.weight"} | {
        f"optimizer/0.weight/{kind}" for kind in ("step", "exp_avg", "exp_avg_sq")
    }


def test_the_memory_of_a_copy_is_used_again_once_it_is_released():
    worker = SteppedWorker(OPTIMIZERS["adam"])
    worker.train(1)
    first = worker.units.read("0.weight", rest=True)
    kept, memory = whole(first), {tensor.data_ptr() for tensor in first.tensors.values()}
    worker.train(2)
    second = worker.units.read("0.weight", rest=True)
    assert memory.isdisjoint(tensor.data_ptr() for tensor in second.tensors.values()) and same(whole(first), kept)
    first.release()
    assert memory == {tensor.data_ptr() for tensor in worker.units.read("0.weight", rest=True).tensors.values()}


def test_seconds_of_copying_are_counted():
    worker, spent = SteppedWorker(OPTIMIZERS["adam"]), []
    units = worker.new_units(spent.append)
    while units.read("0.weight", rest=False) is None:
        pass
    assert len(spent) > 2 and min(spent) > 0


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_a_rate_in_a_tensor_is_taken_into_that_tensor(dtype):
    """The newcomer's script may hold it, and change it for later steps as the others' scripts do."""
    rate = torch.tensor(0.5)
    source, newcomer = (
        SteppedWorker(lambda ps, one=one: torch.optim.SGD(ps, lr=one), scheduler=lambda of: None)
        for one in (torch.tensor(0.125, dtype=dtype), rate)
    )
    newcomer.units.take_settings(source.units.settings())
    (group,) = newcomer.optimizer.wrapped.param_groups
    assert group["lr"] == 0.125 and group["lr"].dtype == dtype and (group["lr"] is rate) == (dtype == rate.dtype)


def test_what_the_other_worker_does_not_have_goes():
    """A newcomer that has trained, with an optimizer that makes its state in the first step."""
    source, target = SteppedWorker(OPTIMIZERS["adam"]), SteppedWorker(OPTIMIZERS["adam"], seed=1)
    for step in (1, 2):
        target.train(step)
    head, weights = source.units.head()
    target.units.fill(head)
    for name in weights:
        target.units.write(name, source.units.read(name, rest=True))
    compare(target, [source])
    assert not target.optimizer.wrapped.state


def with_part(part: StatePart) -> SteppedWorker:
    worker = SteppedWorker(OPTIMIZERS["adam"])
    worker.state.parts[part.name] = part
    return worker


def test_what_belongs_to_no_parameter_makes_a_unit_that_nothing_is_summed_for():
    averages = [{"ema/0": torch.full((30,), float(seed))} for seed in range(2)]
    source, target = (with_part(StatePart("ema", tensors=lambda own=own: own)) for own in averages)
    head, weights = source.units.head()
    source.train(1)
    assert weights["ema/"] == 120 and set(source.units.sums(1, weights)) == weights.keys() - {"ema/"}
    target.units.fill(head)
    target.units.write("ema/", source.units.read("ema/", rest=True))
    assert same(*averages)


class Odd:
    """Nothing that another process would make an object of."""


def test_what_cannot_travel_is_refused_by_name_at_the_newcomer_and_training_goes_on():
    source = with_part(StatePart("oddity", get=Odd, set=lambda value: None))
    head, weights = source.units.head()
    assert weights
    with pytest.raises(RecycleError, match="can't be handed over: part oddity has something that can't be sent"):
        SteppedWorker(OPTIMIZERS["adam"]).units.fill(head)


OTHERS: dict[str, tuple[Callable[[], SteppedWorker], str]] = {
    "another optimizer": (
        partial(SteppedWorker, OPTIMIZERS["sgd"]),
        "the optimizer of the stage's state is SGD here and Adam at the worker that gives it",
    ),
    "another precision": (
        partial(SteppedWorker, OPTIMIZERS["adam"], dtype=torch.bfloat16),
        r"masters/0.bias of the stage's state is float32\[5\] here and not there at the worker",
    ),
    "other groups": (
        partial(SteppedWorker, lambda ps: torch.optim.Adam([{"params": ps[:1]}, {"params": ps[1:]}])),
        "group 0 of the optimizer of the stage's state is 0.weight here and 0.weight, 0.bias, 1.weight",
    ),
    "one part more": (
        lambda: with_part(StatePart("more", get=lambda: 1, set=lambda value: None)),
        "part more of the stage's state is not there: the other worker is of another job",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_stage_is_refused_with_both_sides(other):
    make, said = OTHERS[other]
    target = make()
    before = target.state.digest()
    with pytest.raises(RecycleError, match=said):
        target.units.fill(SteppedWorker(OPTIMIZERS["adam"]).units.head()[0])
    assert target.state.digest() == before
