"""Supervisors' heartbeats by datagram: of whom they count, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from recycle_plugin.authentication.datagrams import SealedDatagrams
from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_workers import Hello, SupervisorHeartbeat
from recycle_plugin.runtime.control.supervisor_heartbeat import HeartbeatListener

KEY = b"of a connection of the supervisor of rank 3"
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
        for data in sent:
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
    nobodys, no_heartbeat = "a datagram that no process of this job has sealed", "sent a datagram that is no heartbeat"
    assert refused[:3] == [nobodys] * 3 and refused[5:] == [nobodys]
    assert refused[3:5] == [f"the supervisor of rank 3 {no_heartbeat}"] * 2


def test_each_counts_once_and_none_that_a_later_one_has_overtaken():
    said = [SupervisorHeartbeat(3, True, float(number)) for number in range(3)]
    first, second, third, last = sealed(count=4, message=lambda number: LAST if number == 3 else said[number])
    taken, refused = heard({3: KEY}, [first, first, third, second, third, last])
    assert taken == [said[0], said[2], LAST] and not refused


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
