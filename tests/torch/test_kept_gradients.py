"""The sum of gradients that is kept until a step's commit is what takes the step back: no copy, and the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.stage.clipping import Clipping, TrueNorm
from recycle_plugin.runtime.stage.gradient_store import TorchGradients
from recycle_plugin.runtime.stage.gradients import Gradients
from recycle_plugin.runtime.stage.ports import Clip
from recycle_plugin.runtime.stage.rates import around_steps
from recycle_plugin.runtime.worker.scaling import LossScale
from recycle_plugin.runtime.worker.stepping import Stepping, undo_record
from tests.support.optimizers import INVERTIBLE, Make, stage_state

SHAPES = (40, 30), (30,), (7, 5)
LIMIT = 0.5


class Scale:
    """A loss scale that a step changes."""

    def __init__(self, loss_scale: float) -> None:
        self.loss_scale = loss_scale

    def update_scale(self, overflow: bool) -> None:
        self.loss_scale *= 2


class Worker:
    """A stage's optimizer, whose sums of gradients are those that a test gives; ``keeps``: undo goes by them."""

    def __init__(self, make: Make, keeps: bool, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.store, self.optimizer = StepStore(Seat(0, 0), 1), make(self.parameters)
        self.count = 0
        where = TorchGradients(self.parameters)
        gradients = Gradients(SimpleNamespace(limit=1), self.store, where, None, [])
        state = stage_state(self.parameters, self.optimizer, step=lambda: self.count)
        self.undo = undo_record("inverse", state, gradients if keeps else None)
        framework = SimpleNamespace(wrapped=self.optimizer, apply=self._apply, steps=0)
        stage = SimpleNamespace(loss_scale=1.0)
        self.stepping = Stepping(
            framework,
            stage,
            gradients,
            Clipping(self.store, where, TrueNorm(), LIMIT),
            LossScale(Scale(scale) if scale != 1.0 else None),
            self.undo,
            SimpleNamespace(view=SimpleNamespace(is_first=False)),
        )

    def _apply(self, clip: Clip) -> None:
        clip()
        self.optimizer.step()
        self.count += 1

    def step(self, number: int, norm: float | None) -> None:
        generator = torch.Generator().manual_seed(number)
        sums = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.store.put(Datum("reduced", 0, None, number), sums)
        if norm is not None:
            self.store.put(Datum("norm", 0, None, number), torch.tensor(norm))
        self.stepping.apply(number)

    def found(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [each.detach().clone() for each in (*self.parameters, *moments) if torch.is_tensor(each)]


def taken_back(keeps: bool, make: Make, norm: float | None, scale: float = 1.0) -> tuple[Worker, list[torch.Tensor]]:
    worker = Worker(make, keeps, scale)
    for number in (1, 2, 3):
        worker.step(number, norm)
        worker.store.drop_sums(number - 1)
    worker.stepping.undo(3)
    return worker, worker.found()


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", INVERTIBLE)
@pytest.mark.parametrize("norm", (None, 0.1, 2.0), ids=("not clipped", "within the limit", "clipped"))
def test_a_step_comes_back_as_from_a_copy(name, norm):
    (kept, mine), (copied, theirs) = (taken_back(keeps, INVERTIBLE[name], norm) for keeps in (True, False))
    assert same(mine, theirs)
    numbers = sum(each.numel() for each in kept.parameters)
    assert copied.undo.held_bytes >= 4 * numbers and kept.undo.held_bytes == copied.undo.held_bytes - 4 * numbers


@pytest.mark.parametrize("norm", (None, 2.0))
def test_a_scaled_one_does_though_the_step_changes_the_scale(norm):
    (_, mine), (_, theirs) = (taken_back(keeps, INVERTIBLE["adam"], norm, 3.0) for keeps in (True, False))
    assert same(mine, theirs)


def other_tensor(parameter: torch.nn.Parameter) -> None:
    parameter.grad = parameter.grad * 3


def in_place(parameter: torch.nn.Parameter) -> None:
    parameter.grad.mul_(3)


@pytest.mark.parametrize("clipped", (False, True))
@pytest.mark.parametrize("change", (other_tensor, in_place))
@pytest.mark.parametrize("of_all", (False, True))
def test_of_a_gradient_that_a_hook_changes_is_a_copy(change: Callable, clipped: bool, of_all: bool, request):
    """What a peer may need stays as it is."""

    def make(parameters) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(parameters, lr=0.01)
        register = register_optimizer_step_pre_hook if of_all else optimizer.register_step_pre_hook
        hook = register(lambda which, *_: change(parameters[1]) if which is optimizer else None)
        request.addfinalizer(hook.remove)
        return optimizer

    (kept, mine), (_, theirs) = (taken_back(keeps, make, 2.0 if clipped else None) for keeps in (True, False))
    assert same(mine, theirs)
    assert 4 * 30 <= kept.undo.held_bytes < 4 * 30 + 4 * len(SHAPES) + 1


def test_within_the_limit_nothing_is_copied():
    worker = Worker(partial(torch.optim.Adam, lr=0.01), True)
    seen = []
    around_steps(worker.optimizer, lambda: seen.extend(each.grad for each in worker.parameters))
    worker.step(1, LIMIT / 2)
    assert all(mine is kept for mine, kept in zip(seen, worker.store[Datum("reduced", 0, None, 1)], strict=True))
