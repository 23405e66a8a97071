"""A supervisor's heartbeats by datagram, beside those over its connection.

After a break in the network a connection's next try may be as far away as the break was long, and its host would be
given up although it is back; a datagram gets through as soon as anything does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from recycle_plugin.core.messages.encoding import decode
from recycle_plugin.core.messages.from_workers import SupervisorHeartbeat


class HeartbeatListener(asyncio.DatagramProtocol):
    """Calls ``take`` with each supervisor heartbeat that arrives by datagram, and ignores everything else."""

    def __init__(self, take: Callable[[SupervisorHeartbeat], None]) -> None:
        self._take = take

    def datagram_received(self, data: bytes, _: object) -> None:
        """asyncio's callback for a datagram."""
        message = decode(data)
        if isinstance(message, SupervisorHeartbeat):
            self._take(message)


async def listen(address: tuple[str, int], take: Callable[[SupervisorHeartbeat], None]) -> asyncio.DatagramTransport:
    """Call ``take`` with the supervisor heartbeats that come to ``address``, until the transport is closed.

    Raises OSError when the port is taken.
    """
    return (
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: HeartbeatListener(take), local_addr=address)
    )[0]


async def connect(address: tuple[str, int]) -> asyncio.DatagramTransport:
    """A transport whose datagrams go to ``address``, or are lost."""
    return (await asyncio.get_running_loop().create_datagram_endpoint(asyncio.DatagramProtocol, remote_addr=address))[0]
