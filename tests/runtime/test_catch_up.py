"""The lines on which a newcomer gets its stage's state: what comes out as it went in, what is damaged, who is let in,
and what is bounded.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from recycle_plugin.authentication.handshake import Port, Seal, Seals, call
from recycle_plugin.core.messages.from_workers import Note
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.state_stream import Asked, Head, Item, Marker, Sums, Unit
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.catch_up import inlet as inlet_module
from recycle_plugin.runtime.catch_up import outlet as outlet_module
from recycle_plugin.runtime.catch_up.inlet import TcpInlet
from recycle_plugin.runtime.catch_up.listener import StateListener
from recycle_plugin.runtime.catch_up.rate import ALONE, BURST_S, COPYING, LEAST, Rate
from recycle_plugin.runtime.catch_up.served import Served
from recycle_plugin.runtime.catch_up.transfers import Transfers
from recycle_plugin.runtime.catch_up.wire import FRAMES, Arrival, Begin, Chunk, Mark, Part, digest, mark
from recycle_plugin.runtime.devices.host import CPU
from tests.support.coordinator import generation
from tests.support.descriptors import none_left
from tests.support.secret import SECRET, answered, called
from tests.support.state_lines import ITEMS, NEWCOMER, PATIENCE_S, Ends, plain, unit
from tests.support.waiting import until

OURS = ("recycle: to ", "recycle: from ", "recycle: state for newcomers", "recycle: a newcomer")  # threads


@pytest.fixture
def ends(coordinator) -> Iterator[Ends]:
    made = Ends(coordinator.session(0))
    yield made
    made.close()


def test_what_is_sent_comes_whole_and_in_its_order(ends):
    outlet, inlet = ends.line()
    for item in ITEMS:
        outlet.send(item)
    found = ends.received(inlet, len(ITEMS))
    assert [*map(plain, found)] == [*map(plain, ITEMS)]
    assert inlet.taken["sums"] == 600_000 * 4 + 7 * 4 and not ends.noted


def test_what_is_asked_for_gets_there_however_much_it_is(ends):
    """More than sockets take at once."""
    outlet, inlet = ends.line()
    names = tuple(f"{number}.{'long' * 50}" for number in range(60_000))
    inlet.ask(Asked(names, head=True))
    found: list[Asked] = []
    until(
        lambda: inlet.items() or found.extend(outlet.asked()) or sum(len(each.units) for each in found) == 60_000,
        "60,000 names",
    )
    assert tuple(name for asked in found for name in asked.units) == names
    assert [asked.head for asked in found] == [True] + [False] * 59


# --- damage and nonsense ----------------------------------------------------------------------------


def test_a_byte_that_changes_on_its_way_is_found(coordinator):
    """Chunks by number: two of the head, then of the first unit's tensors; and of sums."""
    ends = Ends(coordinator.session(0), damaged={4, 14})
    try:
        outlet, inlet = ends.line()
        for item in (Head(4, b"value", {}), unit("a", 4), unit("b", 4, 8), Sums(5, {"a": (torch.ones(3),)}), Marker(5)):
            outlet.send(item)
        head, first, second, marker = ends.received(inlet, 4)
        assert head == Head(4, b"value", {}) and marker == Marker(5)
        assert first == Unit(4, "a", None) and plain(second) == plain(unit("b", 4, 8))
        assert ["was damaged on its way" in text for text in ends.noted] == [True, True]
    finally:
        ends.close()


def test_a_damaged_head_is_asked_for_again(coordinator):
    ends = Ends(coordinator.session(0), damaged={1})
    try:
        outlet, inlet = ends.line()
        outlet.send(Head(4, b"value", {}))
        asked: list[Asked] = []
        until(lambda: inlet.items() or asked.extend(outlet.asked()) or asked, "the head to be asked for again")
        assert asked == [Asked(head=True)]
    finally:
        ends.close()


def said(ends: Ends, *messages: object) -> socket.socket:
    """A connection of a process of the job that has said ``messages``, which are no newcomer's."""
    connection, seals = called(ends.listener.address, Port.STATE)
    connection.sendall(b"".join(FRAMES.frame(message, seals.out) for message in messages))
    return connection


@contextmanager
def odd_source(ends: Ends) -> Iterator[tuple[TcpInlet, socket.socket, Seal, list[str]]]:
    """(a newcomer's end, its source's end and seal for what the test sends, what the newcomer's has noted)."""
    with socket.create_server(("127.0.0.1", 0)) as fake:
        noted: list[str] = []
        address = f"tcp://127.0.0.1:{fake.getsockname()[1]}"
        inlet = TcpInlet(address, Arrival("job", NEWCOMER), SECRET, ends.changed, noted.append)
        ends.inlets.append(inlet)
        with fake.accept()[0] as connection:
            yield inlet, connection, answered(connection, Port.STATE).seals.out, noted


def test_a_frame_that_changes_breaks_the_line(ends):
    """What it says is not known, for instance of which step it is: nothing is guessed."""
    with odd_source(ends) as (inlet, connection, seal, noted):
        whole = bytearray(FRAMES.frame(mark(Marker(4)), seal)), bytearray(FRAMES.frame(mark(Marker(5)), seal))
        whole[1][-10] ^= 1
        connection.sendall(whole[0] + whole[1])
        ends.wait(lambda: noted, "a note")
        assert "a message that does not fit its seal" in noted[0]
        assert not inlet.broken, "what has come before is still to be taken"
        assert list(inlet.items()) == [Marker(4)]
        until(lambda: inlet.broken, "the end of the line")


def of_units(text: bytes) -> list[object]:
    values = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in (b"value", text)]
    parts = tuple(Part(name, "uint8", (len(value),)) for name, value in zip(("value", "units"), values))
    begin = Begin("head", 4, "", parts)
    said: list[object] = [begin]
    for part, value in zip(parts, values):
        data = value.numpy().tobytes()
        said += [Chunk(part.name, 0, len(data), digest(begin, part.name, 0, data)), data]
    return said


NO_ITEMS: dict[str, list[object]] = {
    "units that are no JSON": of_units(b"no JSON"),
    "units that are no dict": of_units(b"[1]"),
    "units deeper than Python follows": of_units(b"[" * 100_000),
    "bytes that are no bytes": [Begin("script", 4, "", (Part("value", "bfloat16", (0,)),))],
}


@pytest.mark.parametrize("odd", NO_ITEMS)
def test_what_is_no_item_breaks_the_line_and_that_is_said(ends, odd):
    """A line that only stopped would have the newcomer wait for it until a deadline."""
    with odd_source(ends) as (inlet, connection, seal, noted):
        for each in NO_ITEMS[odd]:
            connection.sendall(each if isinstance(each, bytes) else FRAMES.frame(each, seal))
        ends.wait(lambda: inlet.broken, "the end of the line")
        assert "can't be read: " in noted[0]


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:  # not all that was said has been read
        return True


ODD: dict[str, object] = {
    "one of another job": Arrival("another", NEWCOMER),
    "one that nobody has announced": Arrival("job", WorkerId(3, 2)),
    "a long story": Asked(("x" * 5000,)),
    "no arrival": Asked(("x",)),
}


def test_strangers_are_not_let_in_and_that_is_said_once(ends, coordinator):
    outlet = ends.listener.expect(NEWCOMER)
    host, _, port = ends.listener.address.removeprefix("tcp://").rpartition(":")
    for _ in range(2):
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert ended(connection)
    outlet.send(Marker(4))
    assert ends.received(ends.come(), 1) == [Marker(4)], "who is expected still gets in"
    (note,) = [note for note in coordinator.hear(Note) if note.kind == "stranger"]
    assert "for the stage's state, a caller at 127.0.0.1:" in note.text and not outlet.broken


@pytest.mark.parametrize("odd", ODD)
def test_nobody_else_is_let_in_and_that_is_said_once(ends, coordinator, odd):
    outlet = ends.listener.expect(NEWCOMER)
    for _ in range(2):
        with said(ends, ODD[odd]) as connection:
            assert ended(connection)
    outlet.send(Marker(4))
    assert ends.received(ends.come(), 1) == [Marker(4)], "who is expected still gets in"
    refused = [note for note in coordinator.hear(Note) if "has sent an unreadable message" in note.text]
    assert len(refused) == 1 and not outlet.broken


def test_a_second_one_of_the_same_name_is_refused_and_the_first_stays(ends):
    outlet, first = ends.line()
    outlet.send(Marker(4))
    assert ends.received(first, 1) == [Marker(4)]
    second = ends.come()
    until(lambda: second.broken, "the second one's end")
    outlet.send(Marker(5))
    assert ends.received(first, 1) == [Marker(5)]


def test_what_is_no_question_ends_the_line_with_a_note(ends, coordinator):
    outlet = ends.listener.expect(NEWCOMER)
    with said(ends, Arrival("job", NEWCOMER), mark(Marker(4))):
        until(lambda: outlet.asked() or outlet.broken, "the line to end")
    (note,) = coordinator.hear(Note)
    assert "a Mark instead of what is wanted" in note.text


# --- ends ------------------------------------------------------------------------------------------


def test_who_is_gone_is_noticed_at_either_end(ends):
    outlet, inlet = ends.line()
    outlet.send(Marker(4))
    assert ends.received(inlet, 1)
    inlet.close()
    until(lambda: outlet.asked() or outlet.broken, "the source to notice")
    outlet, inlet = ends.line()
    until(lambda: outlet._connection is not None, "the newcomer")
    outlet.send(unit("a", 4))
    outlet.close()
    until(lambda: inlet.broken or len(inlet._items) == 1, "what was sent before the end")
    assert [plain(item) for item in inlet.items()] == [plain(unit("a", 4))]
    until(lambda: inlet.broken, "the newcomer to notice")


def test_a_source_that_nobody_answers_for_is_broken(ends):
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
    inlet = TcpInlet(address, Arrival("job", NEWCOMER), SECRET, ends.changed, ends.noted.append)
    inlet.ask(Asked(("a",)))
    ends.wait(lambda: inlet.broken, "the end")


def test_asking_never_waits_for_who_has_just_come(ends):
    """A socket with a deadline is waited for by Python, whatever its flags say."""
    outlet, (here, there) = ends.listener.expect(NEWCOMER), socket.socketpair()
    here.settimeout(PATIENCE_S)
    with there:
        assert outlet.take(here, Seals(Seal(b""), Seal(b""), b"")) and here.gettimeout() == 0.0 and not outlet.asked()


def test_who_is_announced_again_comes_anew(ends):
    outlet, inlet = ends.line()
    until(lambda: outlet._connection is not None, "the newcomer")
    again = ends.listener.expect(NEWCOMER)
    until(lambda: inlet.broken, "the first line's end")
    again.send(Marker(7))
    assert ends.received(ends.come(), 1) == [Marker(7)] and outlet.broken


def test_threads_and_descriptors_are_given_back(coordinator):
    session = coordinator.session(0)
    counts = []
    for _ in range(4):
        ends = Ends(session)
        outlet, inlet = ends.line()
        outlet.send(unit("a", 4))
        ends.received(inlet, 1)
        ends.close()
        until(lambda: inlet.broken and outlet.broken, "both ends")
        until(lambda: not [one for one in threading.enumerate() if one.name.startswith(OURS)], "threads to end")
        gc.collect()  # sockets of tests before this one
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1:] == counts[:-1]


def test_without_a_descriptor_left_a_newcomer_waits_until_there_is_one(ends):
    outlet = ends.listener.expect(NEWCOMER)
    outlet.send(Marker(4))
    host, _, port = ends.listener.address.removeprefix("tcp://").rpartition(":")
    connection = socket.socket()
    with none_left(os.getpid()):
        connection.connect((host, int(port)))
    with connection:
        seals = call(connection, SECRET, Port.STATE).seals
        connection.settimeout(PATIENCE_S)
        connection.sendall(FRAMES.frame(Arrival("job", NEWCOMER), seals.out))
        assert FRAMES.receive(connection, Mark, seals.into) == mark(Marker(4))


# --- bounds ----------------------------------------------------------------------------------------


def test_units_that_wait_leave_no_room_for_more(ends, monkeypatch):
    monkeypatch.setattr(outlet_module, "ROOM", 1000)
    outlet = ends.listener.expect(NEWCOMER)
    assert outlet.has_room(True)
    outlet.send(unit("a", 4, 400))
    assert not outlet.has_room(True)
    inlet = ends.come()
    ends.received(inlet, 1)
    until(lambda: outlet.has_room(True), "room")


def test_a_newcomer_that_takes_sums_too_slowly_is_given_up(ends, coordinator, monkeypatch):
    """Not for few bytes, and not for two steps of many; units do not count."""
    monkeypatch.setattr(outlet_module, "ROOM", 1000)
    outlet = ends.listener.expect(NEWCOMER)
    for step in range(1, 9):
        outlet.send(Sums(step, {"a": (torch.ones(2),)}))
    outlet.send(unit("a", 4, 4000))
    assert not outlet.broken
    outlet = ends.listener.expect(WorkerId(4, 1))
    for step in (5, 5, 6):
        outlet.send(Sums(step, {"a": (torch.ones(400),)}))
        assert not outlet.broken
    outlet.send(Sums(7, {"a": (torch.ones(400),)}))
    assert outlet.broken
    assert "it reads updates too slowly: 6400 bytes of more than 2 steps" in coordinator.hear(Note)[-1].text


def test_a_newcomer_reads_no_further_than_it_takes_in(ends, monkeypatch):
    monkeypatch.setattr(inlet_module, "ROOM", 10_000)
    outlet, inlet = ends.line()
    sent = [unit(str(number), 4, 500) for number in range(40)]
    for item in sent:
        outlet.send(item)
    ends.wait(lambda: inlet._waiting > 5_000, "what there is room for")
    found: list[Item] = []
    ends.wait(lambda: found.extend(checked(inlet)) or len(found) == 40, "all")
    assert [*map(plain, found)] == [*map(plain, sent)]


def checked(inlet: TcpInlet) -> list[Item]:
    assert inlet._waiting <= 10_000
    return inlet.items()


def test_sums_are_sent_from_where_they_are_and_let_go(ends):
    outlet, inlet = ends.line()
    tensor = torch.ones(3000)
    seen = weakref.ref(tensor)
    outlet.send(Sums(4, {"a": (tensor,)}))
    del tensor
    assert len(ends.received(inlet, 1)) == 1
    until(lambda: seen() is None, "the tensor to be let go")


# --- rate ------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("alone", (False, True))
def test_copying_takes_its_share_of_the_time_and_what_is_waited_is_free(alone):
    clock, copied = Clock(), 0.0
    rate = Rate(lambda: alone, clock, lambda: 0.0)
    for _ in range(100_000):
        clock.now += 0.0001
        if rate.may_copy(waiting=False):
            rate.copied(0.001)
            clock.now, copied = clock.now + 0.001, copied + 0.001
    share = COPYING * (ALONE if alone else 1.0)
    assert share * 0.95 < copied / clock.now < share * 1.05 + BURST_S / clock.now
    while rate.may_copy(waiting=False):
        rate.copied(0.001)
    for _ in range(10):
        assert rate.may_copy(waiting=True)
        rate.copied(1.0)
    clock.now += 0.05 / share
    assert rate.may_copy(waiting=False), "which has cost nothing"
    rate.copied(0.001)
    rate.copied(0.2)
    clock.now += 0.15 / share
    assert not rate.may_copy(waiting=False), "the rest of a unit, before a step, has"


def test_who_sends_takes_what_is_idle():
    def share(idle: float, alone: bool = False) -> float:
        return 0.01 / (0.01 + Rate(lambda: alone, idle=lambda: idle).rest_s(0.01))

    assert share(4.0) == 1.0 and share(1.0) == 0.5 and share(0.0) == pytest.approx(LEAST)
    assert share(4.0, alone=True) == ALONE and share(0.0, alone=True) == pytest.approx(LEAST * ALONE)


def test_what_it_came_to_to_serve_is_told_once(coordinator):
    """By an event, at the end of the line, if anything of the state was sent."""
    session = coordinator.session(0)
    session.view.adopt(generation(1, [0]))
    ends = Ends(session, alone=True)
    try:
        outlet, inlet = ends.line()
        for waiting in (True, False, True):
            assert outlet.has_room(waiting)
            outlet.copied(0.001)
        for item in (unit("a", 4, 1000), Sums(5, {"a": (torch.ones(3),)}), unit("b", 4, 2000)):
            outlet.send(item)
        ends.received(inlet, 3)
        outlet.send(Marker(5))
        assert ends.received(inlet, 1) == [Marker(5)], "so what was sent before has been counted"
        outlet.close()
        until(lambda: outlet.broken, "the end of the line")
        outlet.close()
        ends.listener.expect(NEWCOMER).close()  # that nobody came for
        session.note("last", "")
        while not any(note.kind == "last" for note in coordinator.hear(Note)):
            threading.Event().wait(0.002)
        (told,) = [note for note in coordinator.hear(Note) if note.kind == "served"]
    finally:
        ends.close()
    found = told.details
    assert found["seat"] == "0.0" and found["newcomer"] == NEWCOMER.rank
    assert found["bytes"] == 3000 * (4 + 2) + 2 * (4 + len(b"plain"))  # weights, masters, and a step each
    assert found["bubble_share"] == pytest.approx(2 / 3, abs=0.001) and found["core_share"] == ALONE
    assert found["bytes_per_s"] > 0 and "the last worker of its stage" in found["held_by"]
    assert told.text.startswith("seat 0.0 (rank 0) has sent rank 3 0.0 MB of its stage's state in ")


@pytest.mark.parametrize(
    "rest_s, alone, why",
    (
        (0.0, False, "not held back"),
        (3.0, False, "held back since the cores are busy"),
        (3.0, True, "held back since it is the last worker of its stage"),
    ),
)
def test_an_account_says_what_a_source_was_held_to(rest_s, alone, why):
    clock = Clock()
    served = Served(clock)
    clock.now = 100.0  # before the first byte nothing is served
    served.sent(10, 1.0, rest_s, alone)
    clock.now += rest_s + 1.0
    served.sent(10, 1.0, rest_s, alone=False)
    assert served.details() == {
        "bytes": 20,
        "seconds": 2.0 + rest_s,
        "bytes_per_s": round(20 / (2.0 + rest_s)),
        "core_share": round(1.0 / (1.0 + rest_s), 3),
        "bubble_share": 1.0,
        "held_by": why,
    }


# --- all of a worker's ------------------------------------------------------------------------------


def test_a_worker_has_what_it_takes_to_serve_and_to_be_served(coordinator):
    """And no listener before it is needed."""
    source, newcomer = coordinator.session(0), coordinator.session(1)
    for session in (source, newcomer):
        session.view.adopt(generation(1, [0, 1]))
    told: list[Callable] = []
    transfers = [Transfers(session, 0, None, CPU, lambda spent: told.append(spent)) for session in (source, newcomer)]
    assert transfers[0]._listener is None
    units, outlet, address = transfers[0].to(newcomer.view.worker)
    assert units is None and told == [outlet.copied]
    inlet = transfers[1].come_from(address)
    outlet.send(Marker(4))
    with newcomer.waiting.changed:
        assert newcomer.waiting.changed.wait_for(lambda: list(inlet.items()) == [Marker(4)], PATIENCE_S)
    inlet.close()
    for each in transfers:
        each.close()


# --- the interface -----------------------------------------------------------------------------------


def test_newcomers_come_to_the_interface_of_the_setting(coordinator):
    session = coordinator.session(0)
    for interface in ("lo", "127.0.0.1", None):
        ends = Ends(session, interface=interface)
        try:
            assert ends.listener.address.startswith("tcp://127.0.0.1:")
            outlet, inlet = ends.line()
            outlet.send(Marker(4))
            assert ends.received(inlet, 1) == [Marker(4)]
        finally:
            ends.close()


@pytest.mark.parametrize(
    "interface, why",
    (
        (
            "eth77",
            "recycle.transfer_interface: 'eth77' is neither an address nor one of this host's network interfaces",
        ),
        ("203.0.113.7", "recycle.transfer_interface: 203.0.113.7: no newcomer could connect there"),
    ),
)
def test_an_interface_that_is_not_there_is_refused(coordinator, interface, why):
    with pytest.raises(RecycleError, match=why):
        StateListener(coordinator.session(0), interface, Rate())
