"""Workers and supervisors that a test plays, at a coordinator of its own."""

from __future__ import annotations

from contextlib import asynccontextmanager
from math import inf

from recycle_plugin.core.messages.from_coordinator import Generation, Resume, Welcome
from recycle_plugin.core.messages.from_workers import Hello, Ready, SurvivorReport
from recycle_plugin.runtime.control.coordinator import Coordinator
from recycle_plugin.runtime.control.in_loop import InLoop
from tests.support.membership import job, member
from tests.support.secret import SECRET

PATIENCE_S = 10.0


class Player(InLoop):
    """A worker or a supervisor that the test plays."""

    def __init__(self, coordinator: Coordinator, rank: int, role: str = "worker", process: int = 1000) -> None:
        self.control = coordinator.connect()
        super().__init__(self.control)
        self.send(Hello(rank, role, process + rank, "h"))

    async def hear(self, *kinds: type) -> object:
        while not isinstance(message := await self.receive(PATIENCE_S), kinds):
            assert message is not None, f"no {kinds} came: {self.broken}"
        return message

    async def hear_the_end(self) -> None:
        while await self.receive(PATIENCE_S) is not None:
            pass
        assert self.broken is not None


@asynccontextmanager
async def serving(said: list, ranks: int = 4):
    """A coordinator that listens, at a port that it does not say."""
    coordinator = Coordinator(ranks, lambda event, now: said.append(event), SECRET)
    await coordinator.start("127.0.0.1", 0)
    try:
        yield coordinator
    finally:
        await coordinator.close()


@asynccontextmanager
async def four_workers(said: list):
    """(coordinator, workers) of a job that has started."""
    async with serving(said) as coordinator:
        workers = [Player(coordinator, rank) for rank in range(4)]
        for rank, worker in enumerate(workers):
            assert (await worker.hear(Welcome)).incarnation == 0
            worker.send(Ready(member(rank), 0, job(heartbeat_timeout_s=inf)))
        for rank, worker in enumerate(workers):
            await worker.hear(Generation)
            worker.send(SurvivorReport(rank, 0, 0, "plan", {}))
        for worker in workers:
            await worker.hear(Resume)
        yield coordinator, workers
        for worker in workers:
            worker.close()
