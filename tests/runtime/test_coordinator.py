"""The coordinator over real connections: whose they are, and what is nobody's."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf

import pytest

from recycle_plugin.core.protocol import (
    Committed, End, Exited, Generation, Hello, Left, Over, Pulse, Ready, Report, Resume, Stepped, Terminate, Welcome, decode, encode,
)  # fmt: skip
from recycle_plugin.runtime.coordinator import Coordinator
from tests.support.membership import job, member

PATIENCE_S = 10.0


class Worker:
    """A worker, or a supervisor, that the test plays."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, rank: int, role: str = "worker") -> Worker:
        worker = cls(*await asyncio.open_connection("127.0.0.1", port))
        worker.say(Hello(rank, role, 1000 + rank, "h"))
        return worker

    def say(self, message: object) -> None:
        self.writer.write(encode(message))

    async def hear(self, kind: type) -> object:
        """The next message of that kind."""
        while True:
            message = decode(await asyncio.wait_for(self.reader.readline(), PATIENCE_S))
            if isinstance(message, kind):
                return message


@asynccontextmanager
async def four_workers(said: list):
    """(port, workers) of a job that has started."""
    coordinator = Coordinator(4, 1, lambda event, now: said.append(event))
    await coordinator.start("127.0.0.1", 0)
    port = coordinator._server.sockets[0].getsockname()[1]
    workers = [await Worker.connect(port, rank) for rank in range(4)]
    try:
        for rank, worker in enumerate(workers):
            assert (await worker.hear(Welcome)).incarnation == 0
            worker.say(Ready(member(rank), 0, job(heartbeat_timeout_s=inf)))
        for rank, worker in enumerate(workers):
            await worker.hear(Generation)
            worker.say(Report(rank, 0, 0, "plan", {}))
        for worker in workers:
            await worker.hear(Resume)
        yield port, workers
    finally:
        for worker in workers:
            worker.writer.close()
        await coordinator.close()


def test_a_second_process_of_a_rank_is_turned_away_and_the_first_one_goes_on():
    said = []

    async def play() -> None:
        async with four_workers(said) as (port, workers):
            late = await Worker.connect(port, 2)
            assert (await late.hear(Welcome)).incarnation == 1
            late.say(Ready(replace(member(2), incarnation=1), 0, job()))
            assert "nobody can join as rank 2 yet" in (await late.hear(End)).reason
            late.writer.close()
            await late.writer.wait_closed()
            for rank, worker in enumerate(workers):
                worker.say(Stepped(rank, 0, 1))
            for worker in workers:
                assert (await worker.hear((Committed, End, Over))) == Committed(1)

    asyncio.run(play())
    kinds = [event.kind for event in said]
    assert kinds.count("late") == 1 and not {"lost", "left", "end"} & set(kinds[: kinds.index("committed")])


@pytest.mark.parametrize("message", (Exited(2, 1, 0.0), Terminate(2, "a supervisor got SIGINT"), Pulse(2, True)), ids=lambda one: type(one).__name__)
def test_what_a_second_supervisor_of_a_rank_says_is_not_of_the_first_ones_worker(message):
    """A launcher that was started twice: its worker is turned away, so it ends, and its supervisor says so of the same rank."""
    said = []

    async def play() -> None:
        async with four_workers(said) as (port, workers):
            first, second = [await Worker.connect(port, 2, "supervisor") for _ in range(2)]
            assert await first.hear((Welcome, Over)) == await second.hear((Welcome, Over))
            second.say(message)
            assert await second.hear(Over) == Over(1), "it has nothing to wait for"
            second.writer.close()
            await second.writer.wait_closed()
            for number in range(1, 4):
                for rank, worker in enumerate(workers):
                    worker.say(Stepped(rank, 0, number))
                for worker in workers:
                    assert (await worker.hear((Committed, Generation, End))) == Committed(number)
            for rank, worker in enumerate(workers):
                worker.say(Left(rank))
            assert await first.hear(Over) == Over(0)

    asyncio.run(play())
    assert not {"lost", "terminate", "end"} & {event.kind for event in said}


def test_what_is_not_understood_is_said_and_half_a_line_is_a_death():
    said = []

    async def play() -> None:
        async with four_workers(said) as (_, workers):
            record = encode(Ready(member(1), 0, job())).replace(b'"stages":2', b'"stages":"2"')
            workers[1].writer.write(record)
            workers[3].writer.write(b'{"type":"Ste')
            workers[3].writer.close()
            while len((await workers[0].hear(Generation)).members) > 2:
                pass

    asyncio.run(play())
    (warning,) = [event for event in said if event.kind == "warning" and "understood" in event.text]
    assert warning.text == "worker 1 says what can't be understood: job.stages is '2', and it has to be int"
    assert [event.details["rank"] for event in said if event.kind == "lost"] in ([1, 3], [3, 1])
