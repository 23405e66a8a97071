"""What every implementation of the Control port does, and what only one of them can show."""

from __future__ import annotations

import asyncio
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from recycle_plugin.authentication.handshake import Port
from recycle_plugin.authentication.secret import Secret
from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.messages.encoding import CONTROL, HEAD, LIMIT, MAGIC, encode
from recycle_plugin.core.messages.from_coordinator import Lease, Over, Placed, Welcome
from recycle_plugin.core.messages.from_workers import Heartbeat, Hello, Post
from recycle_plugin.core.messages.kept import EVERY
from recycle_plugin.core.messages.mirroring import Got
from recycle_plugin.core.messages.said import LONGEST
from recycle_plugin.runtime.control import connections, framed
from recycle_plugin.runtime.control.connections import SocketControl, connect
from recycle_plugin.runtime.control.framed import Control, Disconnected
from recycle_plugin.runtime.control.in_loop import AT_ONCE, InLoop
from recycle_plugin.runtime.control.in_process import InProcess
from tests.support.certificates import tls_secret
from tests.support.secret import SECRET, answered, way

PATIENCE_S = 60.0
HELLO = Hello(1, "worker", 2, "h")
WELCOME = Welcome("a job")
MIDDLE = Post(0, 0, "x", b"y" * (1 << 20))
LARGE = Post(0, 0, "x", b"y" * (LONGEST - 100))  # more than any socket takes at once


class Ends:
    """``near`` has made the connection, to ``far``; ``answered`` has every other end that its resuming makes."""

    def __init__(self, near: Control, answered: queue.Queue, hang_up: Callable[[], None]) -> None:
        self.near, self.answered, self.hang_up = near, answered, hang_up
        self.far: Control = answered.get(timeout=PATIENCE_S)

    def raw(self, data: bytes) -> None:
        self.far._socket.sendall(data) if isinstance(self.far, SocketControl) else self.far._out.put(data)

    def whole(self, *frames: bytes) -> bytes:
        """Frames as the far end sends them, each with its seal over a network."""
        seals = self.far._seals
        return b"".join(frame if seals is None else frame + seals.out.of(frame) for frame in frames)


@pytest.fixture(params=("sockets", "TLS", "in process"))
def ends(request) -> Iterator[Ends]:
    before, made = files(), []
    answered: queue.Queue = queue.Queue()

    def answer(end: Control) -> None:
        made.append(end)
        answered.put(end)

    if request.param != "in process":
        secret = SECRET if request.param == "sockets" else tls_secret()
        listener = socket.create_server(("127.0.0.1", 0))
        accepting = threading.Thread(target=accept, args=(listener, answer, secret))
        accepting.start()
        near = connect(way(listener.getsockname(), secret), PATIENCE_S)
        found = Ends(near, answered, lambda: hang_up(listener, accepting))
    else:
        refused: list[int] = []
        found = Ends(
            InProcess(lambda end: end.close() if refused else answer(end)), answered, lambda: refused.append(1)
        )
    yield found
    found.hang_up()
    for end in (found.near, *made):
        end.close()
    assert files() <= before  # an earlier test's may have been closed meanwhile


def accept(listener: socket.socket, answer: Callable[[Control], None], secret: Secret) -> None:
    while True:
        try:
            connection = listener.accept()[0]
            answer(SocketControl(answered(connection, Port.CONTROL, secret=secret)))
        except OSError:  # it was shut
            return


def hang_up(listener: socket.socket, accepting: threading.Thread) -> None:
    if listener.fileno() >= 0:
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(PATIENCE_S)
        listener.close()


def files() -> set[str]:
    """What this process's descriptors are open on, each by a name of its own."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the one by which the folder was read
            continue
    return found


def beats(count: int, rank: int = 0) -> list[Heartbeat]:
    return [Heartbeat(rank, number, 0, Activity(WAITS, "")) for number in range(count)]


def make_again(ends: Ends, welcome: Welcome) -> tuple[Control, Hello]:
    """The far end of the connection that is made again, which has answered so, and with what the near one came."""
    resuming = threading.Thread(target=lambda: ends.near.resume(HELLO, PATIENCE_S))
    resuming.start()
    again = ends.answered.get(timeout=PATIENCE_S)
    hello = again.receive(PATIENCE_S)
    again.send(welcome)
    resuming.join(PATIENCE_S)
    assert ends.near.broken is None
    return again, hello


def hear(end: Control, count: int) -> list[object]:
    return [end.receive(PATIENCE_S) for _ in range(count)]


def readable(end: Control, timeout_s: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(end.fileno(), select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def in_thread(work: Callable[[], object]) -> Callable[[], object]:
    results: queue.Queue = queue.Queue()
    threading.Thread(target=lambda: results.put(work()), daemon=True).start()
    return lambda: results.get(timeout=PATIENCE_S)


def gone(end: Control) -> Disconnected:
    """Nothing more comes, and why."""
    assert end.receive(PATIENCE_S) is None and end.broken is not None
    return end.broken


# --- messages ----------------------------------------------------------------------------------------


def test_messages_come_in_their_order(ends):
    for message in beats(300):
        assert ends.near.send(message)
    assert hear(ends.far, 300) == beats(300) and ends.far.receive() is None and ends.far.broken is None


def test_what_another_one_follows_at_once_goes_along_with_that(ends):
    first, second = beats(2)
    assert ends.near.send(first, more=True) and ends.far.receive() is None
    assert ends.near.send(second) and hear(ends.far, 2) == [first, second]


def test_a_frame_that_is_made_once_may_be_sent_to_several(ends):
    frame = encode(Over(3))
    assert ends.near.send(frame) and ends.far.send(frame)
    assert ends.near.receive(PATIENCE_S) == ends.far.receive(PATIENCE_S) == Over(3)


def test_a_message_as_large_as_they_may_be(ends):
    heard = in_thread(lambda: ends.far.receive(PATIENCE_S))
    assert ends.near.send(LARGE, PATIENCE_S)
    assert heard() == LARGE


def test_a_message_comes_in_pieces(ends):
    frame = ends.whole(encode(Heartbeat(0, 1, 2, Activity(WAITS, ""))))
    for place in range(len(frame)):
        assert ends.near.receive() is None and ends.near.broken is None
        ends.raw(frame[place : place + 1])
        assert readable(ends.near, PATIENCE_S)
    assert ends.near.receive() == Heartbeat(0, 1, 2, Activity(WAITS, ""))


def test_several_messages_come_in_one_piece(ends):
    ends.raw(ends.whole(*map(encode, beats(3))) + encode(Over(0))[:5])
    assert hear(ends.near, 3) == beats(3) and ends.near.receive() is None and ends.near.broken is None


def test_both_ends_speak_at_once(ends):
    """More than any buffer holds, so each has to be read while it speaks."""

    def speak(end: Control) -> list[bool]:
        return [end.send(MIDDLE, PATIENCE_S) for _ in range(20)]

    said = [in_thread(lambda end=end: speak(end)) for end in (ends.near, ends.far)]
    heard = [in_thread(lambda end=end: hear(end, 20)) for end in (ends.near, ends.far)]
    assert [each() for each in heard] == [[MIDDLE] * 20] * 2 and [each() for each in said] == [[True] * 20] * 2


def test_several_threads_send_and_no_message_is_torn(ends):
    said = [
        in_thread(lambda rank=rank: [ends.near.send(beat, PATIENCE_S) for beat in beats(100, rank)])
        for rank in range(4)
    ]
    heard = hear(ends.far, 400)
    assert all(all(each()) for each in said)
    assert [[beat for beat in heard if beat.rank == rank] for rank in range(4)] == [
        beats(100, rank) for rank in range(4)
    ]


def test_it_says_when_there_is_something_to_read(ends):
    assert not readable(ends.near)
    ends.far.send(Over(0))
    assert readable(ends.near, PATIENCE_S)
    ends.near.receive()
    assert not readable(ends.near)
    ends.far.close()
    assert readable(ends.near, PATIENCE_S)


def test_one_read_finds_a_message_and_that_nothing_follows_it(ends, monkeypatch):
    """Of TLS a read returns one record, and another may be there."""
    read, reads = ends.near._read, []
    monkeypatch.setattr(ends.near, "_read", lambda: reads.append(1) or read())
    for number in (1, 2):
        ends.far.send(Lease(number, 1.0))
        assert readable(ends.near, PATIENCE_S)
        assert [ends.near.receive(), ends.near.receive()] == [Lease(number, 1.0), None]
        assert len(reads) == number * (1 if isinstance(getattr(ends.near, "_socket", None), socket.socket) else 2)


# --- the end -----------------------------------------------------------------------------------------


def test_what_was_said_before_a_death_is_heard_first(ends):
    """... also by who has found out by saying something itself."""
    for message in beats(3):
        ends.far.send(message)
    ends.far.close()
    while ends.near.send(MIDDLE) and not ends.near._mute:
        pass
    assert hear(ends.near, 3) == beats(3) and "gone" in gone(ends.near).why and ends.near.broken.unreadable is None


def test_a_death_in_the_middle_of_a_message(ends):
    ends.raw(ends.whole(encode(Over(1))) + encode(Over(2))[:-1])
    ends.far.close()
    assert ends.near.receive(PATIENCE_S) == Over(1)
    assert gone(ends.near) == Disconnected("the other end is gone, in the middle of a message")


def test_a_broken_connection_takes_what_is_said_and_raises_nothing(ends):
    ends.far.close()
    gone(ends.near)
    assert ends.near.send(Over(0)) and ends.near.push() and ends.near.receive(PATIENCE_S) is None
    ends.near.close()
    assert ends.near.send(Over(0), PATIENCE_S) and ends.near.receive(PATIENCE_S) is None
    assert ends.near.broken.why == "the other end is gone"


def test_a_close_wakes_who_receives(ends):
    heard = in_thread(lambda: ends.near.receive(PATIENCE_S))
    ends.near.close()
    assert heard() is None and ends.near.broken == Disconnected("it was closed on this side")
    assert gone(ends.far).why == "the other end is gone"


def test_a_close_wakes_who_sends(ends):
    """Nobody reads, so over sockets the first of them is never through."""

    def speak() -> None:
        while ends.near.broken is None:
            ends.near.send(LARGE, PATIENCE_S)

    ended = in_thread(speak)
    assert readable(ends.far, PATIENCE_S)
    ends.near.close()
    assert ended() is None and ends.near.broken == Disconnected("it was closed on this side")


def test_the_other_ends_close_wakes_who_receives_and_who_sends(ends):
    heard = in_thread(lambda: ends.near.receive(PATIENCE_S))
    assert ends.near.send(Over(0), PATIENCE_S)
    said = in_thread(lambda: ends.near.send(LARGE, PATIENCE_S))
    assert ends.far.receive(PATIENCE_S) == Over(0)
    ends.far.close()
    assert heard() is None and said() and "it was closed" not in ends.near.broken.why


def test_closing_twice_is_closing(ends):
    for _ in range(2):
        ends.near.close()
        ends.far.close()


def test_a_deadline_passes_and_nothing_is_broken(ends):
    assert ends.near.receive(0.05) is None and ends.near.receive() is None and ends.near.broken is None
    assert ends.far.send(Over(0)) and ends.near.receive(PATIENCE_S) == Over(0)


# --- what is no message --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "junk, said",
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame begins with b'GET / HTTP', and no message does"),
        (
            HEAD.pack(MAGIC, CONTROL.version, LIMIT + 1),
            f"has a body of {LIMIT + 1} bytes, and at most {LIMIT} are read",
        ),
        (HEAD.pack(MAGIC, CONTROL.version, 2) + b"\x91\xc1", "is no msgpack"),
        (encode(Placed("x")), "Placed.rank is 'x', and it has to be int"),
    ],
    ids=("junk", "too large", "no body", "a field"),
)
def test_what_is_no_message_breaks_it_and_is_named(ends, junk, said):
    """... behind what was one; the other end hears of the end only."""
    ends.raw(ends.whole(encode(Over(1)), junk))
    assert ends.near.receive(PATIENCE_S) == Over(1)
    broken = gone(ends.near)
    assert said in str(broken.unreadable) and broken.why == str(broken.unreadable)
    assert gone(ends.far).unreadable is None


def test_both_ends_hear_that_they_are_of_different_versions(ends, monkeypatch):
    other = HEAD.pack(MAGIC, CONTROL.version ^ 1, 0)
    monkeypatch.setattr(framed, "VERSION", other)  # what the near end answers
    ends.raw(other)
    for end in (ends.near, ends.far):
        assert "all need the same version of the plugin" in gone(end).why


UNSEALED = "does not fit its seal: somebody on the way has changed it, or sent it again"


@pytest.mark.parametrize("ends", ["sockets"], indirect=True)
@pytest.mark.parametrize("place", (0, len(encode(Over(0))) - 1, len(encode(Over(0))), -1))
def test_a_byte_that_changes_on_its_way_breaks_it(ends, place):
    """Of the message, or of its seal."""
    data = bytearray(ends.whole(encode(Over(0))))
    data[place] ^= 1
    ends.raw(bytes(data))
    broken = gone(ends.near)
    assert broken.unreadable is not None and (place == 0 or UNSEALED in broken.why)


@pytest.mark.parametrize("ends", ["sockets"], indirect=True)
@pytest.mark.parametrize("order", ([0, 0], [1], [0, 2], [0, 1, 1]), ids=str)
def test_a_message_that_is_left_out_or_comes_again_breaks_it(ends, order):
    frames = [ends.whole(encode(Over(number))) for number in range(3)]
    ends.raw(b"".join(frames[number] for number in order))
    assert hear(ends.near, len(order)) == [*map(Over, order[:-1]), None] and UNSEALED in ends.near.broken.why


@pytest.mark.parametrize("ends", ["sockets"], indirect=True)
def test_what_was_recorded_before_it_was_made_again_is_worth_nothing(ends):
    recorded = ends.whole(encode(Over(0)))
    make_again(ends, WELCOME)[0]._socket.sendall(recorded)
    assert UNSEALED in gone(ends.near).why


# --- once more -----------------------------------------------------------------------------------------


def test_who_has_made_it_makes_it_again(ends):
    ends.far.send(Over(0))
    ends.far.close()
    assert ends.near.receive(PATIENCE_S) == Over(0) and gone(ends.near)
    again, hello = make_again(ends, WELCOME)
    ends.near.send(Over(1))
    again.send(Over(2))
    assert (hello, again.receive(PATIENCE_S)) == (HELLO, Over(1)) and ends.near.receive(PATIENCE_S) == Over(2)
    assert again.resume(HELLO, PATIENCE_S) is None


def test_where_it_goes_on_what_was_under_way_comes_once_and_in_order(ends):
    """Both ways: what the other end says that it has, it does not get again."""
    ends.far.send(replace(WELCOME, line=7))
    ends.near.receive(PATIENCE_S)
    for number in range(5):
        ends.near.send(Over(number))
        ends.far.send(Placed(number))
    assert hear(ends.near, 3) == list(map(Placed, range(3)))
    ends.far.close()
    ends.near.send(Over(5))  # into nothing
    again, hello = make_again(ends, replace(WELCOME, line=7, heard=2))
    assert (hello.line, hello.heard) == (7, 3)
    ends.near.send(Over(6))
    assert hear(again, 5) == list(map(Over, range(2, 7)))


def test_what_has_got_there_is_kept_no_longer(ends):
    ends.far.send(replace(WELCOME, line=7))
    ends.near.receive(PATIENCE_S)
    for number in range(EVERY):
        ends.near.send(Over(number))
        ends.far.send(Placed(number))
    ends.far.send(Got(EVERY - 1))
    ends.far.send(Over(9))
    assert hear(ends.near, EVERY + 1)[-1] == Over(9) and ends.near._kept.since(0) == [encode(Over(EVERY - 1))]
    assert hear(ends.far, EVERY + 1)[-1] == Got(EVERY), "it says so itself"


def test_where_it_does_not_go_on_nothing_of_before_comes(ends):
    ends.far.send(replace(WELCOME, line=7))
    ends.near.receive(PATIENCE_S)
    ends.near.send(Over(0))
    again, _ = make_again(ends, replace(WELCOME, line=8))
    ends.near.send(Over(1))
    assert again.receive(PATIENCE_S) == Over(1) and ends.near.line == 8


def test_it_may_be_made_again_before_it_is_broken(ends):
    """Nothing of before comes after."""
    ends.far.send(Over(0))
    ends.raw(encode(Over(9))[:5])
    assert ends.near.receive(PATIENCE_S) == Over(0)
    again, hello = make_again(ends, WELCOME)
    again.send(Over(1))
    assert ends.near.receive(PATIENCE_S) == Over(1) and gone(ends.far) and hello == HELLO


def test_where_nobody_answers_it_stays_broken(ends):
    ends.hang_up()
    ends.far.close()
    gone(ends.near)
    assert ends.near.resume(HELLO, 0.2) is None and ends.near.broken is not None


# --- in an event loop --------------------------------------------------------------------------------------


async def test_in_a_loop_who_waits_is_woken_by_a_message_a_deadline_and_the_end(ends):
    near, far = InLoop(ends.near), InLoop(ends.far)
    waiting = asyncio.create_task(near.receive(PATIENCE_S))
    await asyncio.sleep(0)
    far.send(Lease(1, 2.0))
    assert await waiting == Lease(1, 2.0)
    assert await near.receive(0.05) is None and near.broken is None
    waiting = asyncio.create_task(near.receive(PATIENCE_S))
    await asyncio.sleep(0)
    far.close()
    assert await waiting is None and near.broken is not None
    near.close()


async def test_in_a_loop_a_close_wakes_who_waits(ends):
    near = InLoop(ends.near)
    waiting = asyncio.create_task(near.receive(PATIENCE_S))
    await asyncio.sleep(0)
    near.close()
    assert await waiting is None and near.broken == Disconnected("it was closed on this side")


async def test_in_a_loop_what_is_not_taken_at_once_goes_on_its_way(ends):
    """... while the loop does other things, and in its order."""

    near, far = InLoop(ends.near), InLoop(ends.far)
    for message in (LARGE, Over(1), LARGE, Over(2)):
        near.send(message)
    assert [await far.receive(PATIENCE_S) for _ in range(4)] == [LARGE, Over(1), LARGE, Over(2)]
    near.close()
    far.close()


async def test_in_a_loop_what_was_said_before_the_end_is_heard_and_then_that(ends):
    """Also more than is taken in before anybody asks."""
    near, far = InLoop(ends.near), InLoop(ends.far)
    waiting = asyncio.create_task(near.receive(PATIENCE_S))
    await asyncio.sleep(0)
    said = [Lease(number, 2.0) for number in range(3 * AT_ONCE + 1)]
    for message in said:
        far.send(message)
    far.close()
    heard = [await waiting]
    while near.broken is None and (message := await near.receive(PATIENCE_S)) is not None:
        heard.append(message)
    assert heard == said and near.broken is not None
    near.close()


async def test_in_a_loop_who_hears_gets_each_message_up_to_the_end(ends):
    """Also more than is taken in at once."""
    near, far = InLoop(ends.near), InLoop(ends.far)
    said, heard, last = [Lease(number, 2.0) for number in range(3 * AT_ONCE + 1)], [], asyncio.Event()

    def take(message: object) -> None:
        heard.append(message)
        if message == said[-2]:  # nothing else comes then, and the loop has to know of what it has read
            last.set()

    far.send(said[0])
    hearing = asyncio.create_task(near.hear(take, PATIENCE_S))
    await asyncio.sleep(0)
    for message in said[1:-1]:
        far.send(message)
    await asyncio.wait_for(last.wait(), PATIENCE_S)
    far.send(said[-1])
    far.close()
    await asyncio.wait_for(hearing, PATIENCE_S)
    assert heard == said and near.broken is not None
    near.close()


async def test_in_a_loop_who_hears_is_told_of_silence_and_may_hear_again(ends):
    near, far = InLoop(ends.near), InLoop(ends.far)
    heard = []
    await near.hear(heard.append, 0.05)
    assert near.broken is None
    far.send(Lease(1, 2.0))
    await near.hear(heard.append, 0.05)
    assert heard == [Lease(1, 2.0)] and near.broken is None
    far.send(Lease(2, 2.0))
    assert await near.receive(PATIENCE_S) == Lease(2, 2.0)
    near.close()
    far.close()


@pytest.mark.parametrize("comes", ["before", "meanwhile"])
async def test_in_a_loop_who_hears_may_fail_or_close_the_connection(ends, comes):
    near, far = InLoop(ends.near), InLoop(ends.far)

    def fail(message: object) -> None:
        raise ValueError(message)

    for take in (fail, lambda message: near.close()):
        hearing = asyncio.create_task(near.hear(take, PATIENCE_S))
        if comes == "meanwhile":
            await asyncio.sleep(0)
        far.send(Lease(1, 2.0))
        if take is fail:
            with pytest.raises(ValueError, match="Lease"):
                await asyncio.wait_for(hearing, PATIENCE_S)
        else:
            await asyncio.wait_for(hearing, PATIENCE_S)
    assert near.broken is not None
    far.close()


async def test_in_a_loop_it_is_made_again_while_others_go_on(ends):
    near = InLoop(ends.near)
    ends.far.close()
    assert await near.receive(PATIENCE_S) is None
    resuming = asyncio.create_task(near.resume(HELLO, PATIENCE_S))
    again = InLoop(await asyncio.to_thread(ends.answered.get, timeout=PATIENCE_S))
    assert await again.receive(PATIENCE_S) == HELLO
    again.send(WELCOME)
    assert await resuming == WELCOME
    again.send(Over(1))
    assert await near.receive(PATIENCE_S) == Over(1)
    near.close()
    again.close()


def test_it_knows_what_the_network_holds_up(ends):
    """An end that takes nothing is like a cut line: some bytes are not acknowledged."""
    ends.near.send(Lease(1, 0.0))
    assert isinstance(ends.far.receive(PATIENCE_S), Lease)
    assert not ends.near.held_up
    if isinstance(ends.near, SocketControl):
        while ends.near.send(MIDDLE):
            pass
        assert ends.near.held_up
        ends.near.close()
        assert ends.near.held_up


# --- only over sockets, which take no more than they have room for -----------------------------------------


@pytest.mark.parametrize("ends", ["sockets"], indirect=True)
def test_an_end_that_takes_nothing_is_given_up_after_a_deadline(ends):
    assert not ends.near.send(LARGE, 0.05)
    assert ends.near.broken == Disconnected("the other end has read nothing for 0.05 s")


@pytest.mark.parametrize("ends", ["sockets"], indirect=True)
def test_an_end_that_takes_nothing_is_given_up_before_memory_is(ends, monkeypatch):
    monkeypatch.setattr(framed, "UNSENT", 1 << 25)
    while ends.near.broken is None:
        assert not ends.near.send(LARGE)
    assert "the other end reads nothing, and " in ends.near.broken.why


@pytest.mark.parametrize("ends", ["sockets"], indirect=True)
def test_what_is_kept_goes_with_the_next_push(ends):
    assert not ends.near.send(LARGE) and not ends.near.push()
    heard = in_thread(lambda: ends.far.receive(PATIENCE_S))
    while not ends.near.push():
        ends.near._await(select.POLLOUT, connections.time.monotonic() + PATIENCE_S)
    assert heard() == LARGE


@pytest.mark.parametrize("ends", ["sockets"], indirect=True)
def test_a_reset_is_an_end(ends):
    """A host that comes up again answers so; nothing is said with it."""
    ends.far._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    ends.far._socket.close()
    assert gone(ends.near).unreadable is None


def test_where_nobody_listens_the_address_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
    with pytest.raises(ConnectionError, match=f"no coordinator at {host}:{port} within 0.1 s"):
        connect(way((host, port)), 0.1)
