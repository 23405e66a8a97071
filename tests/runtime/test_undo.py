"""A step that is taken back leaves no bit behind, and done again gives the same bits."""

from __future__ import annotations

import copy

import pytest
import torch

from recycle_plugin.runtime.undo import Snapshot

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
}


class Subject:
    """Parameters with an optimizer, a scheduler and a counter."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4, dtype=torch.float64))]
        self.optimizer = OPTIMIZERS[name](self.parameters)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.count = 0
        self.snapshot = Snapshot(self.parameters, self.optimizer, self._counters, self._set)

    def _counters(self) -> dict:
        return {"scheduler": self.scheduler.state_dict(), "count": self.count}

    def _set(self, counters: dict) -> None:
        self.scheduler.load_state_dict(counters["scheduler"])
        self.count = counters["count"]

    def step(self, seed: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters:
            parameter.grad = scale * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        self.optimizer.step()
        self.scheduler.step()
        self.count += 1

    def state(self) -> tuple:
        return copy.deepcopy(([p.data for p in self.parameters], self.optimizer.state_dict(), self._counters()))


def same(a: object, b: object) -> bool:
    if torch.is_tensor(a):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("earlier", [0, 1, 4])
def test_undo_and_redo_are_exact(name, earlier):
    """``earlier`` 0: the very first step, which creates the optimizer's state."""
    subject = Subject(name)
    for seed in range(earlier):
        subject.step(seed)
    before = subject.state()
    subject.snapshot.take()
    subject.step(99, scale=1e6)
    wrong = subject.state()
    subject.snapshot.restore()
    assert same(subject.state(), before) and not same(wrong, before)
    subject.step(7)
    straight = Subject(name)
    for seed in (*range(earlier), 7):
        straight.step(seed)
    assert same(subject.state(), straight.state())


def test_a_hundred_cycles_do_not_drift():
    subject = Subject("adam")
    subject.step(1)
    before = subject.state()
    for seed in range(100):
        subject.snapshot.take()
        subject.step(seed, scale=10.0**seed % 1e30)
        subject.snapshot.restore()
    assert same(subject.state(), before)


def test_parameters_keep_their_storage():
    subject = Subject("adam")
    addresses = [parameter.data_ptr() for parameter in subject.parameters]
    subject.snapshot.take()
    subject.step(1)
    subject.snapshot.restore()
    assert addresses == [parameter.data_ptr() for parameter in subject.parameters]


def test_without_a_snapshot_there_is_no_way_back():
    with pytest.raises(RuntimeError, match="no snapshot"):
        Subject("sgd").snapshot.restore()
