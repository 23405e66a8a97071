"""The hash of a stage's state, while the worker trains: it is that of the state when it began, since a step waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest
import torch

from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.state.background_hash import BackgroundHash
from recycle_plugin.runtime.state.stage_state import StageState
from tests.support.stepped_worker import SteppedWorker

PATIENCE_S = 30.0


class Slow:
    """A worker that has trained a step, whose hash takes until it is ``let``."""

    def __init__(self, monkeypatch) -> None:
        self.worker, self.told, self.let = SteppedWorker(torch.optim.Adam), SimpleQueue(), threading.Event()
        self.reading = threading.Event()
        self.hash = BackgroundHash(self.worker.state, lambda step, digest: self.told.put((step, digest)))
        self.worker.stepping._await_readers = self.hash.finish
        self.train(1)
        self.right = self.worker.state.digest()
        digesting = StageState.digesting
        monkeypatch.setattr(StageState, "digesting", lambda state: self.slowly(digesting(state)))

    def slowly(self, compute: Callable[[], str]) -> Callable[[], str]:
        def later() -> str:
            self.reading.set()
            assert self.let.wait(PATIENCE_S)
            return compute()

        return later

    def train(self, step: int) -> None:
        self.worker.train(step)


CHANGES = {
    "a step": lambda slow: slow.train(2),
    "an undo": lambda slow: slow.worker.stepping.undo(1),
    "another hash": lambda slow: slow.hash.hash_state(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_change_the_state_waits_for_the_hash(change, monkeypatch):
    slow = Slow(monkeypatch)
    slow.hash.hash_state(1)
    assert slow.reading.wait(PATIENCE_S) and not slow.hash._over.is_set() and slow.told.empty()
    changing = threading.Thread(target=CHANGES[change], args=(slow,), daemon=True)
    before = slow.worker.module[0].weight.detach().clone()
    changing.start()
    changing.join(0.1)
    assert changing.is_alive() and torch.equal(slow.worker.module[0].weight, before)
    slow.let.set()
    changing.join(PATIENCE_S)
    assert not changing.is_alive() and slow.told.get(timeout=PATIENCE_S) == (1, slow.right)
    slow.hash.finish()
    if change == "a step":
        assert not torch.equal(slow.worker.module[0].weight, before)


def test_what_does_not_change_it_goes_on(monkeypatch):
    """Gradients of the next step, and what the script counts."""
    slow = Slow(monkeypatch)
    slow.hash.hash_state(1)
    slow.worker.module(torch.randn(4, 7)).sum().backward()
    slow.worker.optimizer.skipped += 1
    slow.let.set()
    assert slow.told.get(timeout=PATIENCE_S) == (1, slow.right) and slow.hash._over.is_set()


def test_a_hash_of_another_step_is_a_mistake(monkeypatch):
    with pytest.raises(AssertionError, match="the state is that after step 1, not 2"):
        Slow(monkeypatch).hash.hash_state(2)


def test_who_waits_too_long_is_told_for_what(monkeypatch):
    slow = Slow(monkeypatch)
    slow.hash.hash_state(1)
    with pytest.raises(WaitTimeout, match="waited 0.01 s for the hash of the state after step 1"):
        slow.hash.finish(0.01)
    slow.let.set()
    slow.hash.finish()


def test_an_error_of_the_thread_is_raised_where_the_training_is(monkeypatch):
    slow = Slow(monkeypatch)

    def fail() -> str:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(StageState, "digesting", lambda state: fail)
    slow.hash.hash_state(1)
    with pytest.raises(RuntimeError, match="the device is gone"):
        slow.train(2)
    assert slow.hash._over.is_set() and slow.told.empty()


class Held(threading.Event):
    """An event whose first setter is held up right behind that, until it is ``let``."""

    def __init__(self) -> None:
        super().__init__()
        self.setters, self.let = 0, threading.Event()

    def set(self) -> None:
        super().set()
        self.setters += 1
        if self.setters == 2:  # the first one is who makes it
            assert self.let.wait(PATIENCE_S)


def test_a_hash_is_told_as_that_of_its_own_step_if_the_next_one_has_begun(monkeypatch):
    slow = Slow(monkeypatch)
    slow.let.set()
    held = slow.hash._over = Held()
    held.set()
    slow.hash.hash_state(1)
    slow.train(2)
    right = slow.worker.state.digest()
    slow.hash.hash_state(2)
    assert slow.told.get(timeout=PATIENCE_S) == (2, right)
    held.let.set()
    assert slow.told.get(timeout=PATIENCE_S) == (1, slow.right)
