"""A supervisor's heartbeats by datagram, sent if the network holds up its connection.

After a break in the network, TCP's next retry may be as far away as the break was long, and the host would be given up
although it is back. A datagram gets through at once. It is sealed with a key of the supervisor's last connection, so
forged and recorded ones don't count. It only counts if the supervisor could say the same over that connection
(core/coordinator/words.py).
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
    """Listens for heartbeats by datagram. ``take`` gets each heartbeat of a known supervisor, with the Hello of the
    connection that sealed it; ``refuses`` the sender (host, port) of any other datagram, and why.
    """

    def __init__(self, take: Take, refuses: Refuse) -> None:
        self._take, self._refuses = take, refuses
        self._door: DatagramDoor[Hello] = DatagramDoor()
        self.transport: asyncio.DatagramTransport

    @classmethod
    async def listen(cls, address: tuple[str, int], take: Take, refuses: Refuse) -> HeartbeatListener:
        """Listen at ``address`` until :meth:`close`. Raises OSError if the port is taken."""
        loop = asyncio.get_running_loop()
        transport, made = await loop.create_datagram_endpoint(lambda: cls(take, refuses), local_addr=address)
        made.transport = transport
        return made

    def expect(self, rank: int, hello: Hello, datagrams: SealedDatagrams | None) -> None:
        """Accept heartbeats of the supervisor of ``rank``, by its last connection's ``hello`` and ``datagrams``."""
        if datagrams is not None:
            self._door.expect(rank, hello, datagrams.key)

    def close(self) -> None:
        """Stop listening."""
        self.transport.close()

    def datagram_received(self, data: bytes, sender: tuple[Any, ...]) -> None:
        """Handle a datagram, as asyncio's callback."""
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
            self._refuses(sender, f"the supervisor of rank {hello.rank} sent a datagram that is no heartbeat")


class HeartbeatSender:
    """Sends a supervisor's heartbeats to one address, where they arrive or are lost."""

    def __init__(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport

    @classmethod
    async def to(cls, address: tuple[str, int]) -> HeartbeatSender:
        """Return a sender to ``address``."""
        loop = asyncio.get_running_loop()
        return cls((await loop.create_datagram_endpoint(asyncio.DatagramProtocol, remote_addr=address))[0])

    def send(self, heartbeat: SupervisorHeartbeat, sealed: SealedDatagrams) -> None:
        """Send a heartbeat, ``sealed`` with the key of the supervisor's last connection."""
        self._transport.sendto(sealed.sealed(encode(heartbeat)))

    def close(self) -> None:
        """Close the socket."""
        self._transport.close()
