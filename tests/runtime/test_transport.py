"""Boundary tensors arrive under their own name, whole, with their sender's era; what somebody lost has sent is heard, and nothing of it after."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.executor import Interrupted
from recycle_plugin.core.faults import FaultScript
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.protocol import Generation, Missing
from recycle_plugin.core.roster import Member
from recycle_plugin.runtime.errors import WaitTimeout
from recycle_plugin.runtime.tiers import Host
from recycle_plugin.runtime.transport import Transport
from recycle_plugin.runtime.worker.operations import Operations
from recycle_plugin.runtime.world import TorchMachine

from .conftest import generation


def act(index: int, step: int = 1) -> Datum:
    return Datum("act", 0, MicroBatch(0, index), step)


@pytest.fixture
def pair(coordinator):
    ends = [Transport(coordinator.session(rank, wait_timeout_s=5.0)) for rank in (0, 1)]
    yield ends
    for end in ends:
        end.close()


class Inbox:
    """What has come to ``transport``, by datum."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self.here = transport, {}

    def take(self) -> dict[Datum, tuple[torch.Tensor, ...]]:
        self.here |= {datum: tensors for datum, tensors, _ in self._transport.arrivals()}
        return self.here

    def wait(self, datum: Datum) -> tuple[torch.Tensor, ...]:
        return self._transport._session.wait(str(datum), lambda: self.take().get(datum))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_every_dtype_and_shape_travels_bit_for_bit(pair, dtype):
    sender, receiver = pair
    tensors = tuple(torch.randint(0, 2, shape).to(dtype) for shape in [(2, 3, 4), (1,), (0, 5), ()])
    sender.send(receiver.address, act(0), tensors, 0)
    received = Inbox(receiver).wait(act(0))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(received, tensors, strict=True))


def test_non_contiguous_tensors_that_need_a_graph_travel_from_host_memory(pair):
    sender, receiver = pair
    tensor = torch.arange(12.0).reshape(3, 4).t().requires_grad_()
    sender.send(receiver.address, act(0), Host().keep((tensor * 1,)), 0)
    assert torch.equal(Inbox(receiver).wait(act(0))[0], tensor)


def test_order_of_arrival_does_not_matter(pair):
    sender, receiver = pair
    for index in (2, 0, 1):
        sender.send(receiver.address, act(index), (torch.tensor([index]),), 0)
    inbox = Inbox(receiver)
    assert [inbox.wait(act(index))[0].item() for index in range(3)] == [0, 1, 2]


def test_the_same_micro_batch_of_another_step_is_another_datum(pair):
    sender, receiver = pair
    for step in (1, 2):
        sender.send(receiver.address, act(0, step), (torch.tensor([step]),), 0)
    inbox = Inbox(receiver)
    assert [inbox.wait(act(0, step))[0].item() for step in (2, 1)] == [2, 1]


def test_what_has_arrived_is_handed_over_once_with_its_senders_era_also_when_that_is_gone(pair):
    sender, receiver = pair
    for index, era in ((0, 3), (0, 3), (1, 4)):
        sender.send(receiver.address, act(index), (torch.tensor([index]),), era)
    sender.wait_sent([receiver.address])
    sender.leave(set())
    receiver.hear_out(set())
    assert [(datum, era) for datum, _, era in receiver.arrivals()] == [(act(0), 3), (act(0), 3), (act(1), 4)]
    assert not list(receiver.arrivals())


def test_what_a_lost_peer_has_sent_is_heard_though_nobody_has_opened_to_it_yet(coordinator, monkeypatch):
    """Its connection is made, and what it has sent is in this host's memory; the thread that lets peers in has had no time."""
    opened, create = threading.Event(), socket.create_server

    class Late:
        def __init__(self, *given, **named) -> None:
            self._listener = create(*given, **named)

        def accept(self):
            assert opened.wait(30)
            return self._listener.accept()

        def __getattr__(self, name: str):
            return getattr(self._listener, name)

    sessions = [coordinator.session(rank, wait_timeout_s=5.0) for rank in (0, 1)]
    sender = Transport(sessions[0])
    with monkeypatch.context() as patched:
        patched.setattr(socket, "create_server", Late)
        receiver = Transport(sessions[1])
    wait_for = sessions[1].changed.wait_for
    monkeypatch.setattr(sessions[1].changed, "wait_for", lambda *given: opened.set() or wait_for(*given))
    try:
        sender.send(receiver.address, act(0), (torch.tensor([1]),), 0)
        sender.wait_sent([receiver.address])
        sender.leave(set())
        receiver.hear_out(set())
        assert [datum for datum, *_ in receiver.arrivals()] == [act(0)]
    finally:
        opened.set()
        sender.close()
        receiver.close()


def test_the_coordinator_hears_what_does_not_come(pair, coordinator):
    session = pair[1]._session
    session.wait_timeout_s = 0.05
    operations = Operations(session, Nothing(), None, None, None)
    machine = TorchMachine(session, pair[1], operations, FaultScript((), Seat(0, 1)))
    with pytest.raises(WaitTimeout, match=r"act of stage 0, micro-batch 0\.0, step 1 from seat 0\.0, once more"):
        next(machine.wait_for(act(0), Seat(0, 0), lambda: None))
    assert Missing(1, 0, str(act(0)), "0.0") in coordinator.hear(Missing)


class Nothing:
    """A stage that is not asked anything."""

    compute = None


def test_the_coordinator_hears_of_a_connection_that_broke_and_what_is_sent_after_meeting_again_arrives(pair, coordinator):
    sender, receiver = pair
    members = (Member(0, Seat(0, 0), sender.address, "h"), Member(1, Seat(0, 1), receiver.address, "h"))
    sender._session.adopt(Generation(3, members, 0, "start", 0.0))
    sender.send(receiver.address, act(0), (torch.tensor([1]),), 0)
    inbox = Inbox(receiver)
    inbox.wait(act(0))
    sender._outboxes[receiver.address]._connection.shutdown(socket.SHUT_RDWR)
    sender.send(receiver.address, act(1), (torch.tensor([1]),), 0)
    assert Missing(0, 3, "a connection", "0.1") in coordinator.hear(Missing)
    sender.leave({receiver.address})
    sender.send(receiver.address, act(1), (torch.tensor([7]),), 0)
    assert inbox.wait(act(1))[0].item() == 7


def test_a_membership_change_breaks_the_wait(pair, coordinator):
    coordinator.tell(generation(1, [0]))
    with pytest.raises(Interrupted):
        Inbox(pair[1]).wait(act(0))


def test_sends_to_a_peer_that_is_gone_do_not_block(coordinator):
    alive, gone = (Transport(coordinator.session(rank)) for rank in (0, 1))
    address = gone.address
    gone.close()
    for index in range(50):
        alive.send(address, act(index), (torch.zeros(1 << 16),), 0)
    alive.leave(set())
    alive.close()


def test_what_somebody_sent_before_it_went_is_heard_and_nothing_of_it_after(pair):
    sender, receiver = pair
    big = torch.zeros(1 << 20)
    for index in range(8):
        sender.send(receiver.address, act(index), (big,), 0)
    sender.wait_sent([receiver.address])
    sender.leave(set())  # its connection ends, as that of a process that is killed
    receiver.hear_out({"tcp://somebody:else"})
    inbox = Inbox(receiver)
    assert inbox.take().keys() == {act(index) for index in range(8)}
    sender.send(receiver.address, act(9), (big,), 0)
    sender.wait_sent([receiver.address])
    sender.leave(set())
    receiver.hear_out({"tcp://somebody:else"})
    assert inbox.take().keys() == {act(index) for index in range(8)}


def test_who_waits_until_its_peer_has_taken_everything_hears_of_a_membership_change(pair, coordinator):
    sender, receiver = pair
    silent = socket.create_server(("127.0.0.1", 0))  # takes what its buffers hold, and reads nothing
    address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    sender.send(address, act(0), (torch.zeros(1 << 24),), 0)
    coordinator.tell(generation(1, [0]))
    with silent, pytest.raises(Interrupted):
        sender.wait_sent([address])
