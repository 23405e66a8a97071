"""The mover between hosts: connections that break, come late or say nonsense.  What every mover does is in test_mover.py."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from recycle_plugin.core.executor import Interrupted
from recycle_plugin.core.faults import FaultScript
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.protocol import Generation, Missing
from recycle_plugin.core.roster import Member
from recycle_plugin.runtime.device import CPU, There
from recycle_plugin.runtime.errors import WaitTimeout
from recycle_plugin.runtime.tiers import Host
from recycle_plugin.runtime.transport import LANGUAGE, Header, Sender, Transport
from recycle_plugin.runtime.worker.operations import Operations
from recycle_plugin.runtime.world import TorchMachine

from tests.support.moved import Inbox, act

from .conftest import generation


@pytest.fixture
def pair(coordinator):
    ends = [Transport(coordinator.session(rank, wait_timeout_s=5.0), CPU) for rank in (0, 1)]
    yield ends
    for end in ends:
        end.close()


def test_non_contiguous_tensors_that_need_a_graph_travel_from_host_memory(pair):
    sender, receiver = pair
    tensor = torch.arange(12.0).reshape(3, 4).t().requires_grad_()
    sender.send(receiver.address, act(0), Host(CPU).keep((tensor * 1,)), 0)
    assert torch.equal(Inbox(receiver).wait(act(0))[0], tensor)


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
    sender = Transport(sessions[0], CPU)
    with monkeypatch.context() as patched:
        patched.setattr(socket, "create_server", Late)
        receiver = Transport(sessions[1], CPU)
    wait_for = sessions[1].changed.wait_for
    monkeypatch.setattr(sessions[1].changed, "wait_for", lambda *given: opened.set() or wait_for(*given))
    try:
        sender.send(receiver.address, act(0), There((torch.tensor([1]),)), 0)
        sender.wait_sent([receiver.address])
        sender.leave(set())
        receiver.hear_out(set())
        assert [datum for datum, *_ in receiver.arrivals()] == [act(0)]
    finally:
        opened.set()
        sender.close()
        receiver.close()


def test_who_cannot_come_to_its_own_door_hears_out_who_is_in(pair, monkeypatch):
    sender, receiver = pair
    sender.send(receiver.address, act(0), There((torch.tensor([1]),)), 0)
    Inbox(receiver).wait(act(0))
    sender.send(receiver.address, act(1), There((torch.tensor([1]),)), 0)
    sender.wait_sent([receiver.address])
    sender.leave(set())
    monkeypatch.setattr(type(receiver._session), "own_address", "192.0.2.1")  # an address that no machine has
    receiver.hear_out(set())
    assert [datum for datum, *_ in receiver.arrivals()] == [act(1)]


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
    sender.send(receiver.address, act(0), There((torch.tensor([1]),)), 0)
    inbox = Inbox(receiver)
    inbox.wait(act(0))
    sender._outboxes[receiver.address]._connection.shutdown(socket.SHUT_RDWR)
    sender.send(receiver.address, act(1), There((torch.tensor([1]),)), 0)
    assert Missing(0, 3, "a connection", "0.1") in coordinator.hear(Missing)
    sender.leave({receiver.address})
    sender.send(receiver.address, act(1), There((torch.tensor([7]),)), 0)
    assert inbox.wait(act(1))[0].item() == 7


def test_who_waits_until_its_peer_has_taken_everything_hears_of_a_membership_change(pair, coordinator):
    sender, receiver = pair
    silent = socket.create_server(("127.0.0.1", 0))  # takes what its buffers hold, and reads nothing
    address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    sender.send(address, act(0), There((torch.zeros(1 << 24),)), 0)
    coordinator.tell(generation(1, [0]))
    with silent, pytest.raises(Interrupted):
        sender.wait_sent([address])


def test_half_a_tensor_of_a_peer_that_dies_in_it_is_none(pair):
    """The next one's are taken all the same."""
    sender, receiver = pair
    host, _, port = receiver.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as dying:
        dying.sendall(LANGUAGE.encode(Sender("tcp://dying:1")) + LANGUAGE.encode(Header(act(0), 0, (("float32", (4,)),))) + b"12345678")
    sender.send(receiver.address, act(1), There((torch.tensor([1]),)), 0)
    inbox = Inbox(receiver)
    inbox.wait(act(1))
    receiver.hear_out({sender.address})
    assert inbox.take().keys() == {act(1)}
