"""Supervisors' heartbeats by datagram: of whom they count, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from recycle_plugin.authentication.datagrams import WINDOW, SealedDatagrams
from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_workers import Hello, SupervisorHeartbeat
from recycle_plugin.runtime.control.supervisor_heartbeat import HeartbeatListener

KEY = b"of a connection of the supervisor of rank 3"
MANY = 50
LAST = SupervisorHeartbeat(3, False)
HELLO = Hello(3, "supervisor", 1, "h")


def heard(expected: dict[int, bytes], sent: list[bytes]) -> tuple[list[object], list[str]]:
    """What counts of what is ``sent``, before the last heartbeat of rank 3, and why the rest does not."""

    async def exchange() -> tuple[list[object], list[str]]:
        taken, refused, arrived = [], [], asyncio.Event()
        listener = await HeartbeatListener.listen(
            ("127.0.0.1", 0),
            lambda hello, message, sender: (taken.append(message), message == LAST and arrived.set()),
            lambda sender, why: refused.append(str(why)),
        )
        for rank, key in expected.items():
            listener.expect(rank, HELLO, SealedDatagrams(key))
        address = listener.transport.get_extra_info("sockname")
        loop = asyncio.get_running_loop()
        line, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, remote_addr=address)
        for data in sent[:-1] if len(sent) > MANY else ():  # more than a socket holds
            listener.datagram_received(data, ("h", 1))
        for data in sent[-1:] if len(sent) > MANY else sent:
            line.sendto(data)
        await asyncio.wait_for(arrived.wait(), 10)
        line.close()
        listener.close()
        return taken, refused

    return asyncio.run(exchange())


def sealed(key: bytes = KEY, count: int = 1, message: Callable[[int], object] = lambda number: LAST) -> list[bytes]:
    datagrams = SealedDatagrams(key)
    return [datagrams.sealed(encode(message(number))) for number in range(count)]


def test_heartbeats_get_through_and_nothing_else_does():
    """Neither a stranger's, nor what is none; whose a heartbeat may be is tried in test_coordinator.py."""
    mine = SealedDatagrams(KEY)
    first = SupervisorHeartbeat(3, True)
    sent = [
        b"\xff{",
        encode(first),  # as it was once said
        *sealed(b"a key of nobody's"),
        mine.sealed(encode(Hello(3, "worker", 1, "h"))),
        mine.sealed(b"no message"),
        bytearray(mine.sealed(encode(first)))[:-1] + b"x",
        mine.sealed(encode(first)),
        mine.sealed(encode(LAST)),
    ]
    taken, refused = heard({3: KEY, 2: b"of the supervisor of rank 2"}, sent)
    assert taken == [first, LAST]
    nobodys, no_heartbeat = "a datagram that nobody of this job has sealed", "says by datagram what is no heartbeat"
    assert refused[:3] == [nobodys] * 3 and refused[5:] == [nobodys]
    assert refused[3:5] == [f"the supervisor of rank 3 {no_heartbeat}"] * 2


def test_each_counts_once_in_whatever_order_they_come():
    beats = sealed(count=WINDOW, message=lambda number: SupervisorHeartbeat(3, True, float(number)))
    order = [*beats[1:], *beats[1:], beats[0], beats[0]]
    after = SealedDatagrams(KEY)
    for _ in range(WINDOW):
        after.sealed(b"")
    last = after.sealed(encode(LAST))
    taken, refused = heard({3: KEY}, [*order, last])
    assert [beat.cpu_s for beat in taken[:-1]] == [*map(float, range(1, WINDOW)), 0.0] and not refused


def test_one_that_is_far_behind_does_not_count():
    """It can't be told from one that was here."""
    beats = sealed(count=WINDOW + 2)
    assert heard({3: KEY}, [beats[-1], beats[0], *beats[-1:]])[0] == [LAST]


async def test_of_a_supervisors_connections_the_last_two_count():
    """What was recorded of one before those is worth nothing."""

    taken, refused = [], []
    listener = await HeartbeatListener.listen(
        ("127.0.0.1", 0),
        lambda hello, message, sender: taken.append(message),
        lambda sender, why: refused.append(why),
    )
    keys = [b"the first", b"the second", b"the third"]
    for key in keys:
        listener.expect(3, HELLO, SealedDatagrams(key))
    for key in keys:
        listener.datagram_received(sealed(key)[0], ("h", 1))
    listener.close()
    assert taken == [LAST, LAST] and len(refused) == 1
