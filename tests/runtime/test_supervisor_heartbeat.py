"""Pulses by datagram."""

from __future__ import annotations

import asyncio

from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_workers import Hello, SupervisorHeartbeat
from recycle_plugin.runtime.control import supervisor_heartbeat


def test_pulses_get_through_and_nothing_else_does():
    async def exchange() -> list[object]:
        taken, last = [], SupervisorHeartbeat(3, False)
        arrived = asyncio.Event()
        listener = await supervisor_heartbeat.listen(
            ("127.0.0.1", 0), lambda message: (taken.append(message), message == last and arrived.set())
        )
        line = await supervisor_heartbeat.connect(listener.get_extra_info("sockname"))
        for data in (
            b"\xff{",
            b"[]",
            encode(Hello(1, "worker", 1, "h")),
            encode(SupervisorHeartbeat(1, True)),
            encode(last),
        ):
            line.sendto(data)
        await asyncio.wait_for(arrived.wait(), 10)
        line.close()
        listener.close()
        return taken

    assert asyncio.run(exchange()) == [SupervisorHeartbeat(1, True), SupervisorHeartbeat(3, False)]
