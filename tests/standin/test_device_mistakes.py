"""Mistakes with an accelerator, planted in what drives it: the stand-in finds each, and names both places.

On a GPU each of them is a wrong number once in a while.
"""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch import nn

from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.devices import accelerator
from recycle_plugin.runtime.devices.accelerator import Accelerator, StreamEvent
from recycle_plugin.runtime.devices.host import There
from recycle_plugin.runtime.devices.pinned import PinnedMemory
from recycle_plugin.runtime.stage import randomness
from recycle_plugin.runtime.stage.ports import StageModel
from recycle_plugin.runtime.stage.randomness import keyed
from recycle_plugin.runtime.stage.stage import LoadedBatch, Stage

WAIT_S = 30.0


def late_device(standin) -> Accelerator:
    """One whose copies come about at a seeded moment."""
    standin.configure(late=3)
    return Accelerator(torch.device(standin.NAME, 0))


def down(device: Accelerator, shared: bool = True) -> list[float]:
    """What a kernel has made, in host memory; it is changed right afterwards where it is not shared."""
    made = torch.ones(4, device=device.where) * 3
    copy = device.to_host([made], "a sum", shared=shared)
    if not shared:
        made.fill_(7)
    del made
    torch.ones(4, device=device.where)
    return copy.wait(WAIT_S)[0].clone().tolist()


def up(device: Accelerator) -> list[float]:
    """What two copies in a row bring, added up there."""
    given = torch.full((4,), 1.0)
    first = device.from_host([given], "a batch", shared=False)
    second = device.from_host([given.fill_(2.0)], "a batch", shared=False)
    return down_of(device, first.wait(WAIT_S)[0] + second.wait(WAIT_S)[0])


def down_of(device: Accelerator, made: torch.Tensor) -> list[float]:
    return device.to_host([made], "a sum", shared=True).wait(WAIT_S)[0].flatten().tolist()


def forward(device: Accelerator) -> list[float]:
    """A middle stage's forward of what a peer has sent."""
    module = nn.Linear(4, 4).to(device.where)
    stage = Stage(StageModel(module, None, 1, False, False, device), None, lambda *_: keyed(1, device))
    (made,), *_ = stage.forward((0, MicroBatch(0, 0)), LoadedBatch(), (torch.ones(1, 4),))
    return down_of(device, made)


def skip(monkeypatch, owner: object, name: str) -> None:
    monkeypatch.setattr(owner, name, lambda *given, **named: None)


def wait_for_no_compute(monkeypatch, device: Accelerator) -> None:
    skip(monkeypatch, accelerator, "stand_behind")


def let_go_at_once(monkeypatch, device: Accelerator) -> None:
    skip(monkeypatch, torch.Tensor, "record_stream")


def keep_one_buffer(monkeypatch, device: Accelerator) -> None:
    buffer = device.room([4], torch.float32)
    monkeypatch.setattr(device, "room", lambda shape, dtype: buffer)


def stay_on_the_host(monkeypatch, device: Accelerator) -> None:
    monkeypatch.setattr(device, "from_host", lambda tensors, what, shared: There(tuple(tensors)))


def do_not_wait(monkeypatch, device: Accelerator) -> None:
    skip(monkeypatch, accelerator, "await_event")


def only_poll(monkeypatch, device: Accelerator) -> None:
    """Wait until an event has happened, and no more: torch.cuda._sanitizer takes that for no order."""

    def poll(event: torch.Event, what: object, timeout_s: float) -> None:
        while not event.query():
            pass

    monkeypatch.setattr(accelerator, "await_event", poll)


MISTAKES = {
    "no event between computing and a copy": (wait_for_no_compute, down, "mul"),
    "a copy is read that is not over": (do_not_wait, down, "copy_ on the host"),
    "a copy is read behind a poll alone": (only_poll, down, "copy_ on the host"),
    "a block is freed under a copy that runs": (let_go_at_once, down, "free"),
    "what is changed before it is copied": (wait_for_no_compute, partial(down, shared=False), "fill_|mul"),
    "a pinned buffer is used again too early": (keep_one_buffer, up, "copy_"),
    "computing does not wait for a copy to the device": (wait_for_no_compute, up, "add"),
    "a tensor of the host in a device's product": (stay_on_the_host, forward, "same device"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(standin, mistake):
    plant, run, words = MISTAKES[mistake]
    device = late_device(standin)
    run(device)
    assert not standin.violations(), "without the mistake"
    with pytest.MonkeyPatch.context() as patched, pytest.raises(RuntimeError, match=words) as found:
        plant(patched, device)
        run(device)
        standin.check()
    standin.violations()
    assert "same device" in words or str(found.value).count(".py:") >= 2, found.value


def test_generators_are_as_they_were_and_a_mistake_would_be_seen(standin):
    device = late_device(standin)

    def drawn() -> str:
        with keyed(5, device):
            torch.rand(4, device=device.where), torch.rand(4)
        return standin.generators_digest()

    before = standin.generators_digest()
    assert drawn() == before
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(randomness, "_put_back", lambda states: None)
        assert drawn() != before


def test_pinned_memory_has_a_budget_past_which_copies_still_come(standin):
    device = late_device(standin)
    missed: list[int] = []
    device.budget(64, missed.append)
    first = device.room([16], torch.float32)
    second = device.room([1], torch.float32)
    assert first.is_pinned() and not second.is_pinned() and missed == [4]
    view = first[:2]
    del first
    assert not device.room([16], torch.float32).is_pinned() and missed == [4], "a view still holds it; said once"
    assert down(device) == [3.0] * 4
    del view
    assert device.room([16], torch.float32).is_pinned()


def test_no_copy_stands_behind_one_that_goes_apart(standin):
    """Of two of a kind the second's end is the first's, too; a step's record has an order of its own."""
    for apart in (False, True):
        device = late_device(standin)
        first = device.to_host([torch.ones(4, device=device.where)], "a record", shared=True, apart=apart)
        device.to_host([torch.ones(4, device=device.where)], "an activation", shared=True).wait(WAIT_S)
        if apart:
            with pytest.raises(RuntimeError, match="two accesses of pinned host memory are not ordered"):
                standin.host_access(first._targets[0], write=False)
        else:
            standin.host_access(first._targets[0], write=False)
        assert first.wait(WAIT_S)[0].tolist() == [1.0] * 4


def test_memory_that_the_machine_does_not_let_one_pin_is_ordinary(standin):
    make, missed, pinned = torch.empty, [], PinnedMemory()
    pinned.limit(1 << 30, missed.append)
    kept = pinned.room([8], torch.float32)

    def refusing(*given, pin_memory=False, **named):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return make(*given, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "empty", refusing)
        room = pinned.room([4], torch.float32)
    assert not room.is_pinned() and missed == [16] and pinned.used == pinned.budget == kept.nbytes


def test_a_wait_for_the_device_has_a_deadline(standin):
    class Never:
        def query(self) -> bool:
            return False

    with pytest.raises(WaitTimeout, match=r"^waited 0\.01 s for 1F0\.1@3$"):
        StreamEvent(Never(), "1F0.1@3").wait(0.01)


def test_the_process_may_end_while_threads_free_pinned_memory(standin):
    """Its end would go through all that weakref has to finalize, which fails where another thread changes that."""
    device = late_device(standin)
    before = len(weakref.finalize._registry)
    kept = [device.room([100], torch.float32) for _ in range(10)]
    assert all(each.is_pinned() for each in kept) and len(weakref.finalize._registry) == before
    used = device._pinned.used
    kept.clear()
    assert used - device._pinned.used == 5120  # torch pins powers of two
