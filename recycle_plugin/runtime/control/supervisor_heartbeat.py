"""A supervisor's heartbeats by datagram, beside those over its connection if the network holds that one up.

After a break in the network a connection's next try may be as far away as the break was long, and its host would be
given up although it is back; a datagram gets through as soon as anything does.  It is sealed under a key of the
supervisor's last connection, so that nobody else's counts, and none that was recorded; and it counts only where the
supervisor could say the same over that connection (core/coordinator/words.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from recycle_plugin.authentication.datagrams import DatagramDoor, SealedDatagrams
from recycle_plugin.authentication.handshake import Stranger
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_workers import Hello, SupervisorHeartbeat

Take = Callable[[Hello, SupervisorHeartbeat, tuple[Any, ...]], None]
Refuse = Callable[[tuple[Any, ...], OSError | str], None]


class HeartbeatListener(asyncio.DatagramProtocol):
    """Calls ``take`` with each heartbeat of a supervisor that is known, and with the Hello of the connection under
    whose key it has come; ``refuses`` gets the sender of everything else, host and port, and why it changes nothing.
    """

    def __init__(self, take: Take, refuses: Refuse) -> None:
        self._take, self._refuses = take, refuses
        self._door: DatagramDoor[Hello] = DatagramDoor()
        self.transport: asyncio.DatagramTransport

    @classmethod
    async def listen(cls, address: tuple[str, int], take: Take, refuses: Refuse) -> HeartbeatListener:
        """Listen at ``address`` until :meth:`close`.  Raises OSError when the port is taken."""
        loop = asyncio.get_running_loop()
        transport, made = await loop.create_datagram_endpoint(lambda: cls(take, refuses), local_addr=address)
        made.transport = transport
        return made

    def expect(self, rank: int, hello: Hello, datagrams: SealedDatagrams | None) -> None:
        """Take those of the supervisor of ``rank`` from now on, whose last connection began with ``hello``, and has
        sealed ``datagrams``.
        """
        if datagrams is not None:
            self._door.expect(rank, hello, datagrams.key)

    def close(self) -> None:
        """Listen no more."""
        self.transport.close()

    def datagram_received(self, data: bytes, sender: tuple[Any, ...]) -> None:
        """asyncio's callback for a datagram."""
        try:
            opened = self._door.opened(data)
        except Stranger as stranger:
            self._refuses(sender, stranger)
            return
        if opened is None:
            return
        hello, message = opened[0], decode(opened[1])
        if isinstance(message, SupervisorHeartbeat):
            self._take(hello, message, sender)
        else:
            self._refuses(sender, f"the supervisor of rank {hello.rank} says by datagram what is no heartbeat")


class HeartbeatSender:
    """Sends a supervisor's heartbeats to an address, where they get there or are lost."""

    def __init__(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport

    @classmethod
    async def to(cls, address: tuple[str, int]) -> HeartbeatSender:
        """A sender to ``address``."""
        loop = asyncio.get_running_loop()
        return cls((await loop.create_datagram_endpoint(asyncio.DatagramProtocol, remote_addr=address))[0])

    def send(self, heartbeat: SupervisorHeartbeat, sealed: SealedDatagrams) -> None:
        """Send it, ``sealed`` as the supervisor's last connection does."""
        self._transport.sendto(sealed.sealed(encode(heartbeat)))

    def close(self) -> None:
        """Send nothing more."""
        self._transport.close()
