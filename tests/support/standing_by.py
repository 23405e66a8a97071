"""One that stands by for the coordinator, and jobs of one worker and of four in which it does."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from recycle_plugin.core.coordinator import mirror
from recycle_plugin.core.messages.from_coordinator import Committed, Generation, Welcome
from recycle_plugin.core.messages.from_workers import (
    Fingerprint,
    Heartbeat,
    Hello,
    Stepped,
)
from recycle_plugin.runtime.control.connections import connect
from recycle_plugin.runtime.control.coordinator import Coordinator
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.control.mirror import follow
from tests.support.coordinator_players import PATIENCE_S, Player
from tests.support.membership import computes
from tests.support.secret import SECRET, way

STANDBY = Hello(-1, mirror.STANDBY, 77, "h")


@asynccontextmanager
async def standing_by(coordinator: Coordinator):
    """(the process that is in step, each time that it changes; what the one that stands by comes to know)."""
    changes: list[int] = []
    coordinator.mirror.watch(changes.append)
    control = InLoop(coordinator.connect())
    learnt: list[mirror.Known] = []
    following = asyncio.create_task(follow(control, STANDBY, learnt.append))

    async def known() -> mirror.Known:
        await following
        return learnt[-1]

    task = asyncio.create_task(known())
    while not changes:
        await asyncio.sleep(0)
    try:
        yield changes, task
    finally:
        task.cancel()
        control.close()


@asynccontextmanager
async def one_worker():
    """(a coordinator of one worker, a connection of that which it has welcomed, what that has said)."""
    coordinator = Coordinator(1, lambda event, now: None, SECRET)
    await coordinator.start("127.0.0.1", 0)
    hello = Hello(0, "worker", 12, "h")
    control = await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S)
    try:
        control.send(hello)
        assert isinstance(await asyncio.to_thread(control.receive, PATIENCE_S), Welcome)
        yield coordinator, control, hello
    finally:
        control.close()
        await coordinator.close()


async def step(workers: list[Player], number: int, ranks: range = range(4)) -> None:
    for rank in ranks:
        workers[rank].send(Heartbeat(rank, number, number, computes("1F0.0@1")))
        workers[rank].send(Fingerprint(rank, number, "same"))
        workers[rank].send(Stepped(rank, 0, number))
    for rank in ranks:
        assert await workers[rank].hear(Committed, Generation) == Committed(number)
