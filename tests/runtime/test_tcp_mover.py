"""The mover between hosts: connections that break, come late or say nonsense.

What every mover does is in test_mover.py.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from recycle_plugin.authentication.handshake import Port, Seals, call
from recycle_plugin.core.messages.encoding import HEAD
from recycle_plugin.core.messages.from_coordinator import BarrierPassed, Committed, Generation, Recorded
from recycle_plugin.core.messages.from_workers import Missing, Note
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.commit_rule import AHEAD, EVALUATIONS_AHEAD
from recycle_plugin.core.vocabulary.faults import FaultScript
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.devices.host import CPU, There
from recycle_plugin.runtime.lines.frames import peer_at
from recycle_plugin.runtime.movers import outbox, tcp
from recycle_plugin.runtime.movers.tcp import Transport
from recycle_plugin.runtime.movers.wire import FRAMES, LANGUAGE, Header, Sender
from recycle_plugin.runtime.system.accepting import PAUSE_S
from recycle_plugin.runtime.worker.machine import TorchMachine
from recycle_plugin.runtime.worker.operations import TorchOperations
from recycle_plugin.runtime.worker.tiers import Host
from tests.support.coordinator import NO_STATE, generation
from tests.support.descriptors import none_left
from tests.support.moved import Inbox, act
from tests.support.secret import SECRET, called


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


def test_what_a_lost_peer_has_sent_is_heard_though_nobody_has_read_it_yet(coordinator, monkeypatch):
    """What it has sent is in this host's memory; the thread that reads it has had no time."""
    opened, read = threading.Event(), FRAMES.receive

    def late(*given):
        assert opened.wait(30)
        return read(*given)

    monkeypatch.setattr(FRAMES, "receive", late)
    sessions = [coordinator.session(rank, wait_timeout_s=5.0) for rank in (0, 1)]
    sender, receiver = (Transport(session, CPU) for session in sessions)
    wait_for = sessions[1].waiting.changed.wait_for
    monkeypatch.setattr(sessions[1].waiting.changed, "wait_for", lambda *given: opened.set() or wait_for(*given))
    try:
        sender.send(receiver.address, act(0), There((torch.tensor([1]),)), 0)
        sender.wait_sent([receiver.address])
        sender.keep_only(set())
        receiver.hear_out(set())
        assert [datum for datum, *_ in receiver.arrivals()] == [act(0)]
    finally:
        opened.set()
        sender.close()
        receiver.close()


def test_who_cannot_come_to_its_own_door_hears_out_who_is_in(coordinator, pair, monkeypatch):
    sender, receiver = pair
    sender.send(receiver.address, act(0), There((torch.tensor([1]),)), 0)
    Inbox(receiver).wait(act(0))
    sender.send(receiver.address, act(1), There((torch.tensor([1]),)), 0)
    sender.wait_sent([receiver.address])
    sender.keep_only(set())
    monkeypatch.setattr(type(coordinator.sessions[1]), "own_address", "192.0.2.1")  # an address that no machine has
    receiver.hear_out(set())
    assert [datum for datum, *_ in receiver.arrivals()] == [act(1)]


def test_who_was_heard_out_and_stays_connected_is_not_waited_for_again(pair, monkeypatch):
    """As a worker that has left as planned, whose script goes on for long."""
    sender, receiver = pair
    sender.send(receiver.address, act(0), There((torch.tensor([1]),)), 0)
    Inbox(receiver).wait(act(0))
    monkeypatch.setattr(tcp, "DEATH_S", 0.2)
    receiver.hear_out(set())
    monkeypatch.setattr(tcp, "DEATH_S", 3600.0)
    again = threading.Thread(target=receiver.hear_out, args=(set(),), daemon=True)
    again.start()
    again.join(30)
    assert not again.is_alive()


def test_the_coordinator_hears_what_does_not_come(pair, coordinator):
    session = coordinator.sessions[1]
    session.waiting.timeout_s = 0.05
    operations = TorchOperations(session, Nothing(), None, None, None)
    machine = TorchMachine(session, pair[1], operations, FaultScript((), Seat(0, 1)), *NO_STATE)
    with pytest.raises(WaitTimeout, match=r"act of stage 0, micro-batch 0\.0, step 1 from seat 0\.0, once more"):
        next(machine.wait_for(act(0), Seat(0, 0), lambda: None))
    assert Missing(1, 0, str(act(0)), "0.0") in coordinator.hear(Missing)


class Nothing:
    """A stage that is not asked anything."""

    compute = device = None


def test_the_coordinator_hears_of_a_connection_that_broke_and_what_is_sent_after_meeting_again_arrives(
    pair, coordinator
):
    sender, receiver = pair
    members = (Member(0, Seat(0, 0), sender.address, "h"), Member(1, Seat(0, 1), receiver.address, "h"))
    coordinator.sessions[0].view.adopt(Generation(3, members, 0, "start", 0.0))
    sender.send(receiver.address, act(0), There((torch.tensor([1]),)), 0)
    inbox = Inbox(receiver)
    inbox.wait(act(0))
    sender._outboxes[receiver.address]._connection.shutdown(socket.SHUT_RDWR)
    sender.send(receiver.address, act(1), There((torch.tensor([1]),)), 0)
    assert Missing(0, 3, "a connection", "0.1") in coordinator.hear(Missing)
    sender.keep_only({receiver.address})
    sender.send(receiver.address, act(1), There((torch.tensor([7]),)), 0)
    assert inbox.wait(act(1))[0].item() == 7


def test_who_waits_until_its_peer_has_taken_everything_hears_of_a_membership_change(pair, coordinator):
    sender, _ = pair
    silent = socket.create_server(("127.0.0.1", 0))  # takes what its buffers hold, and reads nothing
    address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    sender.send(address, act(0), There((torch.zeros(1 << 24),)), 0)
    coordinator.tell(generation(1, [0]))
    with silent, pytest.raises(Interrupted):
        sender.wait_sent([address])


def test_half_a_tensor_of_a_peer_that_dies_in_it_is_none(pair):
    """The next one's are taken all the same."""
    sender, receiver = pair
    dying, seals = called(receiver.address, Port.TENSORS)
    with dying:
        dying.sendall(said(seals, Sender("tcp://dying:1"), Header(act(0), 0, (("float32", (4,)),))) + b"12345678")
    sender.send(receiver.address, act(1), There((torch.tensor([1]),)), 0)
    inbox = Inbox(receiver)
    inbox.wait(act(1))
    receiver.hear_out({sender.address})
    assert inbox.take().keys() == {act(1)}


# --- deaf and dumb ------------------------------------------------------------------------------------


def test_a_moment_without_descriptors_makes_nobody_deaf_and_is_said_once(pair, coordinator):
    """Who comes in that moment is let in after it, and a knock at one's own door shows it."""
    receiver = pair[1]
    assert receiver.hears()
    host, _, port = receiver.address.removeprefix("tcp://").rpartition(":")
    with socket.socket() as peer:
        with none_left(os.getpid()):
            peer.connect((host, int(port)))
            (note,) = coordinator.hear(Note)
            assert not receiver.hears()
        peer.sendall(said(call(peer, SECRET, Port.TENSORS).seals, Sender("tcp://peer:1"), Header(act(0), 7, ())))
        assert [
            valid_from
            for _, _, valid_from in coordinator.sessions[1].waiting.until(
                "the peer's datum", lambda: list(receiver.arrivals()) or None
            )
        ] == [7]
    assert receiver.hears() and coordinator.hear(Note) == [note]
    assert (
        note.text
        == "at worker 1 a connection could not be accepted (Too many open files); it is tried again every 0.5 s, and "
        "this is said once"
    )


def test_who_has_no_descriptor_for_a_connection_tries_again(pair):
    sender, receiver = pair
    with none_left(os.getpid()):
        sender.send(receiver.address, act(0), There((torch.tensor([1]),)), 0)
        outbox = sender._outboxes[receiver.address]
        with outbox._changed:
            assert not outbox._changed.wait_for(lambda: outbox.broken, PAUSE_S)
    assert Inbox(receiver).wait(act(0))[0].item() == 1


def test_who_finds_no_descriptor_complains_of_itself(pair, coordinator, monkeypatch):
    sender, receiver = pair
    coordinator.sessions[0].view.adopt(
        Generation(
            3,
            (Member(0, Seat(0, 0), sender.address, "h"), Member(1, Seat(0, 1), receiver.address, "h")),
            0,
            "start",
            0.0,
        )
    )
    monkeypatch.setattr(outbox, "CONNECT_S", 0.0)
    with none_left(os.getpid()):
        sender.send(receiver.address, act(0), There((torch.tensor([1]),)), 0)
        assert coordinator.hear(Missing) == [Missing(0, 3, "a connection (Too many open files)", "0.0")]


def test_who_lets_nobody_in_says_so_when_something_does_not_come_and_when_all_meet_again(
    pair, coordinator, monkeypatch
):
    receiver, session = pair[1], coordinator.sessions[1]
    session.view.adopt(Generation(3, (Member(1, Seat(0, 1), receiver.address, "h"),), 0, "start", 0.0))
    session.waiting.timeout_s = 0.05
    machine = TorchMachine(
        session, receiver, TorchOperations(session, Nothing(), None, None, None), FaultScript((), Seat(0, 1)), *NO_STATE
    )
    for name in ("CONNECT_S", "DEATH_S"):
        monkeypatch.setattr(tcp, name, 0.2)
    monkeypatch.setattr(receiver._listener, "_let_in", lambda connection, peer: connection.close())  # as if stuck
    with pytest.raises(WaitTimeout):
        next(machine.wait_for(act(0), Seat(0, 0), lambda: None))
    assert coordinator.hear(Missing) == [Missing(1, 3, str(act(0)), "0.1")]
    coordinator.tell(generation(4, [0, 1]))
    session.waiting.until("the news", lambda: session.view.interruption(), interruptible=False)
    machine.hear_out()
    with coordinator.news:
        assert coordinator.news.wait_for(lambda: Missing(1, 3, "what peers send", "0.1") in coordinator.heard, 30)


shapes = st.lists(st.integers(-2, 5) | st.integers(), max_size=3).map(tuple)
types = st.sampled_from(("float32", "bool", "complex64", "quint8", "bits8", "nn", "int4", "__name__")) | st.text(
    max_size=3
)
headers = st.builds(Header, st.just(act(0)), st.integers(), st.lists(st.tuples(types, shapes), max_size=2).map(tuple))


def sealed(seals: Seals, *frames: bytes) -> bytes:
    return b"".join(frame + seals.out.of(frame) for frame in frames)


def said(seals: Seals, *messages: object) -> bytes:
    return sealed(seals, *map(LANGUAGE.encode, messages))


@st.composite
def nonsense(draw) -> Callable[[Seals], bytes]:
    """Frames of movers', good ones too, with some bytes changed before they were sealed, or after; or anything."""
    frames = draw(st.lists(st.builds(Sender, st.text(max_size=5)) | headers, max_size=3))
    places = [(draw(st.integers(0, 99)), draw(st.integers(0, 2)), draw(st.binary(max_size=4))) for _ in range(2)]
    changed, before, anything = draw(st.integers(0, 2)), draw(st.booleans()), draw(st.none() | st.binary(max_size=60))

    def change(data: bytes) -> bytes:
        made = bytearray(data)
        for place, length, put in places[:changed]:
            made[place : place + length] = put
        return bytes(made)

    def made(seals: Seals) -> bytes:
        if anything is not None:
            return anything
        each = [change(LANGUAGE.encode(frame)) if before else LANGUAGE.encode(frame) for frame in frames]
        return sealed(seals, *each) if before else change(sealed(seals, *each))

    return made


def test_whatever_bytes_come_the_next_connection_is_heard(pair, coordinator, monkeypatch):
    """... from who knows the secret; and one line is said of all that."""
    (sender, receiver), session = pair, coordinator.sessions[1]
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    @given(nonsense())
    @example(lambda seals: said(seals, Sender("x"), Header(act(0), 0, (("float32", (1 << 40,)),))))
    @example(lambda seals: said(seals, Sender("x"), Header(act(0), 0, (("nn", (1,)),))))
    @example(lambda seals: sealed(seals, HEAD.pack(b"RP", LANGUAGE.version, 1001) + b"\x91" * 1000 + b"\x01"))
    @example(lambda seals: b"GET / HTTP/1.1\r\n\r\n")
    def check(data: Callable[[Seals], bytes]) -> None:
        with socket.create_connection(peer_at(receiver.address)) as far, suppress(ConnectionError):
            seals = call(far, SECRET, Port.TENSORS).seals
            far.sendall(data(seals))
        with session.waiting.changed:
            assert session.waiting.changed.wait_for(lambda: not receiver._readers, 30) and not raised

    check()
    receiver._arrived.clear()
    sender.send(receiver.address, act(1), There((torch.tensor([1]),)), 0)
    assert Inbox(receiver).wait(act(1))[0].item() == 1
    (note,) = coordinator.hear(Note)
    assert note.text.startswith("at worker 1 a process of this job, at 127.0.0.1:")
    assert ", has sent an unreadable message: " in note.text


def test_what_is_for_a_step_that_nobody_can_have_come_to_is_refused_before_there_is_room_for_it(
    pair, coordinator, monkeypatch
):
    """... and that is said once.  What is said to be committed moves the bound on, and evaluations have their own."""
    receiver, rooms = pair[1], []
    session, room = coordinator.sessions[1], receiver._device.room
    monkeypatch.setattr(receiver, "_device", Rooms(rooms, room))
    host, _, port = receiver.address.removeprefix("tcp://").rpartition(":")

    def hears(step: int) -> bool:
        """Whether what a peer sends for ``step`` arrives; else it is hung up on."""
        rooms.clear()
        with socket.create_connection((host, int(port)), 30) as peer:
            head = Header(act(0, step), 0, (("uint8", (3,)),))
            peer.sendall(said(call(peer, SECRET, Port.TENSORS).seals, Sender("tcp://peer:1"), head) + bytes(3))
            peer.shutdown(socket.SHUT_WR)
            peer.settimeout(30)
            with suppress(ConnectionResetError):  # it has not read all
                assert peer.recv(1) == b""
        come = [datum for datum, *_ in receiver.arrivals()] == [act(0, step)]
        assert come == bool(rooms)
        return come

    def heard(message: object, known: Callable[[], int], value: int) -> None:
        coordinator.tell(message)
        session.waiting.until("the coordinator's word", lambda: known() == value or None)

    far = AHEAD + 1, 1 << 40, -EVALUATIONS_AHEAD - 1, -(1 << 40)
    assert hears(AHEAD) and hears(-EVALUATIONS_AHEAD) and not any(map(hears, far))
    heard(Committed(7), lambda: session.view.committed, 7)
    assert hears(7 + AHEAD) and not hears(8 + AHEAD) and not hears(-EVALUATIONS_AHEAD - 1)
    heard(BarrierPassed(Barrier(Meets.EVALUATED, number=4), {}, 0), lambda: session.view.evaluated, 4)
    assert hears(-4 - EVALUATIONS_AHEAD) and not hears(-5 - EVALUATIONS_AHEAD) and not hears(8 + AHEAD)
    heard(Recorded(1, (), 5, (0.5, 0.5), 0), lambda: session.view.evaluated, 6)
    assert hears(-6 - EVALUATIONS_AHEAD) and not hears(-7 - EVALUATIONS_AHEAD)
    (note,) = coordinator.hear(Note)
    known = "step 0 is the last one committed, evaluation 0 the last one that is over"
    assert note.text.endswith(f"{act(0, AHEAD + 1)}, while {known}")


class Rooms(NamedTuple):
    """A device that notes for what there was room."""

    made: list
    make: Callable[..., torch.Tensor]

    def room(self, *what: object) -> torch.Tensor:
        self.made.append(what)
        return self.make(*what)
