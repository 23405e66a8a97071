"""What everything that tensors are computed on does (runtime/devices/port.py), and what waits for one whose copies are
late.
"""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref

import pytest
import torch

from recycle_plugin.core.vocabulary.faults import FaultScript
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.errors import RecycleError, WaitTimeout
from recycle_plugin.runtime.devices import kinds
from recycle_plugin.runtime.devices.host import CPU, LARGE, Cpu, There
from recycle_plugin.runtime.devices.kinds import device_of, fetch
from recycle_plugin.runtime.movers.batches import packed, unpacked
from recycle_plugin.runtime.movers.tcp import Transport
from recycle_plugin.runtime.stage.backward_choice import SAMPLES, WARM_UP, BackwardChoice
from recycle_plugin.runtime.stage.randomness import keyed, keyed_torch
from recycle_plugin.runtime.state.stage_state import raw
from recycle_plugin.runtime.worker.machine import TorchMachine
from recycle_plugin.runtime.worker.operations import TorchOperations
from recycle_plugin.runtime.worker.tiers import AsMade, Host
from tests.support.coordinator import NO_STATE, generation
from tests.support.device_port import *  # noqa: F403  tests
from tests.support.device_port import WAIT_S, there
from tests.support.late_device import LateDevice
from tests.support.moved import Inbox, act

DEVICES = {"the host": Cpu, "one whose copies are late": LateDevice}


@pytest.fixture(params=DEVICES)
def device(request):
    return DEVICES[request.param]()


@pytest.fixture
def late():
    """Nothing comes about before the test says so."""
    device = LateDevice(held=True)
    yield device
    device.let()


# --- memory of the host ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_large_memory_of_the_host_is_as_any_other(dtype):
    """It is written, viewed, outlives what was made of it first, and goes."""
    numbers = LARGE // dtype.itemsize + 1
    whole = CPU.room((numbers, 2), dtype)
    end = whole.fill_(3.0)[-1]
    assert whole.shape == (numbers, 2) and whole.dtype == dtype and whole.sum(dtype=torch.float64) == 6.0 * numbers
    gone = weakref.ref(whole)
    del whole
    assert gone() is None and end.tolist() == [3.0, 3.0]


# --- copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ("to_host", "from_host"))
def test_what_is_not_shared_may_be_changed_right_afterwards_and_what_comes_of_it_too(device, way):
    given = torch.arange(4.0) if way == "from_host" else there(device, torch.arange(4.0))[0]
    copy = getattr(device, way)([given], "", shared=False)
    given.fill_(7)
    (found,) = copy.wait(WAIT_S)
    assert found.tolist() == [0, 1, 2, 3]
    found.fill_(5)
    assert given.tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("way", ("to_host", "from_host"))
def test_on_the_host_nothing_is_copied_that_may_be_shared(way):
    given = torch.arange(4.0)
    (found,) = getattr(CPU, way)([given], "", shared=True).wait(0)
    assert found.data_ptr() == given.data_ptr()
    assert fetch(given, "").data_ptr() == given.data_ptr() and raw(given).ctypes.data == given.data_ptr()
    assert Host(CPU).keep((given,)).wait(0)[0].data_ptr() == given.data_ptr()


@pytest.mark.parametrize("start", ("to_host", "from_host", "event"))
def test_a_wait_has_a_deadline_and_names_what_it_waited_for_which_goes_on(late, start):
    begun = late.event("2F1.3") if start == "event" else getattr(late, start)([torch.ones(3)], "2F1.3", shared=True)
    assert not begun.poll()
    with pytest.raises(WaitTimeout, match=r"waited 0\.01 s for 2F1\.3"):
        begun.wait(0.01)
    late.let()
    begun.wait(WAIT_S)
    assert begun.poll()


def test_what_fails_is_over_and_raises_its_error_at_each_wait(late):
    late.breaks = RuntimeError("an illegal memory access")
    for begun in (late.to_host([torch.ones(3)], "", shared=True), late.event("")):
        begun.come()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="an illegal memory access"):
                begun.wait(WAIT_S)
        assert begun.poll()


# --- events, random numbers, memory, kinds ------------------------------------------------------------


@pytest.mark.parametrize("draws", (keyed, keyed_torch))
def test_keyed_draws_are_the_same_for_the_same_seed_and_leave_the_streams_alone(device, draws):
    def draw() -> list[float]:
        return [
            torch.rand(1, device=device.where).item(),
            *(torch.rand(1, generator=each, device=each.device).item() for each in device.generators),
        ]

    torch.manual_seed(3)
    before = draw()
    torch.manual_seed(3)
    with draws(5, device):
        inside = draw()
    assert draw() == before != inside
    with draws(5, device):
        assert draw() == inside
    with draws(6, device):
        assert draw() != inside


def test_a_device_is_found_by_where_its_tensors_are_and_another_kind_is_refused_in_one_line():
    assert device_of(torch.ones(1).device) is CPU and device_of(torch.device(f"{CPU.kind}:0")) is CPU
    with pytest.raises(RecycleError, match=r"^the accelerator is meta, and torch finds cpu.* here$") as refused:
        device_of(torch.device("meta"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("asked, found, chosen", [(None, None, "cpu"), ("cpu", "meta", "cpu"), (None, "meta", "meta")])
def test_a_job_computes_on_what_it_was_asked_to_or_else_on_what_torch_finds(monkeypatch, asked, found, chosen):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found and torch.device(found))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(kinds, "device_of", lambda where: where.type)
    assert kinds.own_device(asked) == chosen


# --- the store, and what is read --------------------------------------------------------------------


def test_the_original_lives_until_it_is_copied(late):
    store, made = StepStore(Seat(0, 0), 2, tiers=(AsMade(), Host(late))), torch.arange(6.0)
    store.put(act(0), (made,))
    copy = store.move(act(0), -1)
    seen = weakref.ref(made)
    del made
    gc.collect()
    late.let()
    assert copy.wait(WAIT_S)[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert seen() is None


def test_a_scripts_batch_is_kept_as_it_was_given():
    inputs, labels = torch.arange(4.0), torch.arange(8).reshape(2, 4).t()
    kept = packed((inputs, labels))
    inputs.fill_(7), labels.fill_(7)
    found = unpacked(kept)
    assert found[0].tolist() == [0, 1, 2, 3] and torch.equal(found[1], torch.arange(8).reshape(2, 4).t())


def test_a_sparse_batch_is_kept_too():
    given = torch.eye(3).to_sparse()
    assert torch.equal(unpacked(packed(given)).to_dense(), torch.eye(3))


def test_what_is_conjugated_only_when_it_is_read_goes_to_a_peer_as_it_reads():
    """As the gradient of what a stage conjugates first."""
    (sent,) = Host(CPU).keep((torch.tensor([1 + 2j]).conj(),)).wait(0)
    assert bytes(raw(sent)) == bytes(raw(torch.tensor([1 - 2j])))


# --- the transport waits, and its caller does not -----------------------------------------------------


@pytest.fixture
def pair(coordinator, late):
    """Those of two workers, the first of which sends from ``late``."""
    ends = [Transport(coordinator.session(rank, wait_timeout_s=WAIT_S), each) for rank, each in ((0, late), (1, CPU))]
    yield ends
    for end in ends:
        end.close()


def test_a_sender_goes_on_while_what_it_sends_is_on_its_way_to_the_host_and_nothing_overtakes_that(pair, late):
    sender, receiver = pair
    kept = [Host(late).keep((torch.full((3,), float(index)),)) for index in range(3)]
    for index in (0, 1):
        sender.send(receiver.address, act(index), kept[index], 0)
    sender.send(receiver.address, act(2), There((torch.full((3,), 2.0),)), 0)
    assert not any(copy.poll() for copy in kept), "its caller has waited"
    assert sender._outboxes[receiver.address].backlog and not Inbox(receiver).take()
    kept[1].come()
    kept[0].come()
    sender.wait_sent([receiver.address])
    inbox = Inbox(receiver)
    assert [inbox.wait(act(index))[0].tolist() for index in range(3)] == [[float(index)] * 3 for index in range(3)]
    assert list(inbox.here) == [act(0), act(1), act(2)]


def test_also_over_a_connection_that_stands_and_takes_all_at_once(pair, late):
    sender, receiver = pair
    inbox = Inbox(receiver)
    sender.send(receiver.address, act(0), There((torch.zeros(1),)), 0)
    inbox.wait(act(0))
    sender.wait_sent([receiver.address])
    copy = Host(late).keep((torch.arange(3.0),))
    sender.send(receiver.address, act(1), copy, 0)
    sender.send(receiver.address, act(2), There((torch.zeros(1),)), 0)
    assert not copy.poll() and sender._outboxes[receiver.address].backlog
    copy.come()
    assert inbox.wait(act(1))[0].tolist() == [0, 1, 2]
    inbox.wait(act(2))
    assert list(inbox.here) == [act(0), act(1), act(2)]


def test_others_get_theirs_while_one_waits_for_a_copy(pair, late, coordinator):
    sender, receiver = pair
    other = Transport(coordinator.session(2, wait_timeout_s=WAIT_S), CPU)
    try:
        sender.send(other.address, act(0), Host(late).keep((torch.ones(3),)), 0)
        sender.send(receiver.address, act(1), There((torch.ones(3),)), 0)
        assert Inbox(receiver).wait(act(1))[0].tolist() == [1, 1, 1] and not Inbox(other).take()
    finally:
        other.close()


def test_what_is_not_on_the_host_would_not_survive_its_sender(coordinator, pair, late):
    sender, receiver = pair
    copy = Host(late).keep((torch.ones(3),))
    sender.send(receiver.address, act(0), copy, 0)
    coordinator.sessions[0].waiting.timeout_s = 0.05
    with pytest.raises(WaitTimeout, match="a peer to take what is sent to it"):
        sender.wait_sent([receiver.address])
    copy.come()
    coordinator.sessions[0].waiting.timeout_s = WAIT_S
    sender.wait_sent([receiver.address])
    assert Inbox(receiver).wait(act(0))[0].tolist() == [1, 1, 1]


CALLS = {
    "asks what has come": lambda sender, address: list(sender.arrivals()),
    "sends": lambda sender, address: sender.send(address, act(1), There((torch.ones(1),)), 0),
    "waits until all is taken": lambda sender, address: sender.wait_sent([address]),
    "waits for something else": lambda sender, address: Inbox(sender).wait(act(5)),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_copy_that_fails_is_an_error_of_the_senders_at_its_next_call_and_no_peers_fault(
    coordinator, pair, late, call, monkeypatch
):
    (sender, receiver), blamed = pair, []
    monkeypatch.setattr(sender, "_broke", blamed.append)
    late.breaks = RuntimeError("an illegal memory access")
    copy = Host(late).keep((torch.ones(3),))
    sender.send(receiver.address, act(0), copy, 0)
    copy.come()
    with coordinator.sessions[0].waiting.changed:
        assert coordinator.sessions[0].waiting.changed.wait_for(lambda: sender._failure is not None, WAIT_S)
    with pytest.raises(
        RecycleError, match=r"act of stage 0, micro-batch 0\.0, step 1 could not be sent: an illegal memory access"
    ):
        CALLS[call](sender, receiver.address)
    assert not Inbox(receiver).take() and not sender._outboxes[receiver.address].backlog and not blamed


def test_a_copy_that_does_not_come_in_time_is_one_too_and_says_what_it_was(coordinator, pair, late):
    sender, receiver = pair
    coordinator.sessions[0].waiting.timeout_s = 0.05
    sender.send(receiver.address, act(0), Host(late).keep((torch.ones(3),)), 0)
    coordinator.sessions[0].waiting.timeout_s = WAIT_S
    with pytest.raises(
        RecycleError, match=r"micro-batch 0\.0, step 1 could not be sent: waited 0\.05 s for what goes to a peer"
    ):
        Inbox(sender).wait(act(5))


def test_what_arrives_is_read_into_room_of_the_devices(pair, late, coordinator, monkeypatch):
    made, receiver = [], pair[0]
    monkeypatch.setattr(receiver._device, "room", lambda shape, dtype: made.append(CPU.room(shape, dtype)) or made[-1])
    pair[1].send(receiver.address, act(0), There((torch.arange(3.0),)), 0)
    (found,) = Inbox(receiver).wait(act(0))
    assert found is made[0] and found.tolist() == [0, 1, 2]


def test_what_is_drawn_for_a_peer_travels_as_it_is_packed(pair, coordinator):
    sender, receiver = pair
    coordinator.sessions[0].view.adopt(generation(1, [0, 1], addresses={0: sender.address, 1: receiver.address}))
    machine = TorchMachine(coordinator.sessions[0], sender, Nothing(), FaultScript((), Seat(0, 0)), *NO_STATE)
    drawn = act(0)._replace(kind="drawn")
    machine.transfer(drawn, packed((torch.arange(3.0), None)), Seat(1, 0), 0)
    assert unpacked(Inbox(receiver).wait(drawn))[0].tolist() == [0, 1, 2]


def test_a_step_is_begun_with_a_choice_of_split_backwards_which_hears_of_times_while_it_measures(coordinator):
    operations = TorchOperations(session := coordinator.session(0), Computing(CPU), None, None, None)
    choice = operations.choice = BackwardChoice()
    machine = TorchMachine(session, Nothing(), operations, FaultScript((), Seat(0, 0)), *NO_STATE)
    program = [Instruction.parse(f"1{op}0.{index}") for index in range(SAMPLES) for op in ("F", "I", "W")]
    for step in range(1, WARM_UP + 4):
        with machine.running(StepProgram(step, tuple(one.at(step) for one in program))):
            assert choice.measuring == (WARM_UP < step <= WARM_UP + 2)
            assert choice.whole(MicroBatch(1, 0)) == (step >= WARM_UP + 2)
            for one in program:
                if one.op is Op.I:
                    choice.runs((step, one.works_on), choice.whole(MicroBatch(1, 0)))
                machine.record(Span(Seat(0, 1), one.at(step), 0, 7))


# --- an instruction is over when the device is done with it ---------------------------------------------


class Nothing:
    """Operations that are not asked anything."""

    compute = share = norm = undo = forget_sums = tied_in_order = go_by = None


class Stepping:
    """An optimizer that has nothing to do."""

    def apply(self, step: int) -> None:
        pass


class Computing:
    """A stage that starts something on ``device``."""

    def __init__(self, device) -> None:
        self.device = device

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> dict:
        return {}


def test_the_host_is_at_most_one_instruction_ahead_of_the_device(coordinator, late):
    session, ran = coordinator.session(0, wait_timeout_s=0.05), []
    operations = TorchOperations(session, Computing(late), None, None, None)
    first, second, third = (Instruction(Op.F, 0, MicroBatch(0, index), 3) for index in range(3))
    for one in (first, second):
        assert operations.compute(one, None, False) == {}
        assert list(operations.timeline.spans(Span(Seat(0, 0), one, 1, 2))) == []
    with pytest.raises(WaitTimeout, match=re.escape(f"waited 0.05 s for {first}")):
        operations.compute(third, None, False)
    session.waiting.timeout_s = WAIT_S
    thread = threading.Thread(target=lambda: ran.append(operations.compute(third, None, False)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not ran
    late.let()
    thread.join(WAIT_S)
    assert ran == [{}]


def test_spans_are_of_the_device_and_all_are_over_behind_a_step(coordinator, device):
    operations = TorchOperations(coordinator.session(0), Computing(device), Stepping(), None, lambda step: None)
    program = [*(Instruction(Op.F, 0, MicroBatch(0, index), 3) for index in range(3)), Instruction(Op.STEP, 0, None, 3)]
    spans = []
    for one in program:
        began_us = time.time_ns() // 1000
        operations.compute(one, None, False)
        spans += operations.timeline.spans(Span(Seat(0, 0), one, began_us, time.time_ns() // 1000))
    assert [span.instruction for span in spans] == program
    times = [time for span in spans for time in (span.start_us, span.end_us)]
    assert times == sorted(times) and times[0] > 1e15, "of the host's clock, one behind the other"


def test_what_does_not_compute_is_over_at_once(coordinator, late):
    operations = TorchOperations(coordinator.session(0), Computing(late), None, None, None)
    operations.compute(Instruction(Op.F, 0, MicroBatch(0, 0), 3), None, False)
    span = Span(Seat(0, 0), Instruction(Op.RECV_ACT, 1, MicroBatch(0, 0), 3, Seat(0, 0)), 1, 2)
    assert list(operations.timeline.spans(span)) == [span]


def test_what_a_device_fails_with_is_raised_where_the_host_would_go_on(coordinator):
    device = LateDevice()
    device.breaks = RuntimeError("an illegal memory access")
    operations = TorchOperations(coordinator.session(0), Computing(device), None, None, None)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        for index in range(3):
            operations.compute(Instruction(Op.W, 0, MicroBatch(0, index), 3), None, False)
