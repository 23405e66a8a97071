"""What thousands of workers cost the process that coordinates them over real connections, in CPU time.

The coordinator's server runs in a process of its own.  This one plays all workers and supervisors over loopback: they
say what theirs would, at the same intervals, and read what they are told.  Nothing is trained.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

import psutil

from recycle_plugin.authentication.secret import Secret
from recycle_plugin.core.messages.activity import COMPUTES, Activity
from recycle_plugin.core.messages.from_coordinator import Committed, Generation, Resume
from recycle_plugin.core.messages.from_workers import Heartbeat, Hello, Ready, SupervisorHeartbeat, SurvivorReport
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.said import OfWorker
from recycle_plugin.core.vocabulary.deadlines import SUPERVISOR_BEAT_S, WORKER_BEAT_S, paced_s
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.runtime.control.connections import ControlWay, SocketControl, connect
from recycle_plugin.runtime.control.coordinator import Coordinator

DEADLINE_S = 300.0  # of all that is waited for
AT_ONCE = 32  # connections that are made at once
SECRET = "only for a benchmark, where nobody else listens"
HOST = 8  # workers of one


class OverSockets(NamedTuple):
    """The coordinator's CPU time: ``idle`` as a share of a core; ``step`` in seconds of a step beyond that, a mean."""

    workers: int
    idle: float
    step: float


def measured(job: JobSpec, ranks: dict[Seat, int], idle_s: float, steps: Iterable[Iterable[OfWorker]]) -> OverSockets:
    """The cost of a job of these ``ranks``: idle for ``idle_s`` seconds, and of each of ``steps``, all that is said in
    it.  Raises TimeoutError where the coordinator does not answer.
    """
    with _served(len(ranks)) as (process, address), _Workers(job, ranks, address) as workers:
        workers.start()
        began = _cpu_s(process)
        workers.idle(idle_s)
        idle = (_cpu_s(process) - began) / idle_s
        began, at, number = _cpu_s(process), time.monotonic(), 0
        for number, said in enumerate(steps, 1):
            workers.step(number, said)
        spent = _cpu_s(process) - began - idle * (time.monotonic() - at)  # these workers' steps may be long or short
        return OverSockets(len(ranks), idle, spent / max(number, 1))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def _served(ranks: int) -> Iterator[tuple[psutil.Process, tuple[str, int]]]:
    """A coordinator's server of ``ranks`` workers in a process of its own, and where it listens."""
    command = [sys.executable, "-m", "recycle_plugin.lab.control_sockets", str(ranks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            if not select.select([server.stdout], [], [], DEADLINE_S)[0]:
                raise TimeoutError("the coordinator's process has not begun to listen")
            host, port = server.stdout.readline().split()
            yield psutil.Process(server.pid), (host, int(port))
        finally:
            server.kill()


async def _serve(ranks: int) -> None:
    coordinator = Coordinator(ranks, lambda event, now: None, Secret(SECRET))
    await coordinator.start("127.0.0.1", 0)
    print(*coordinator.address, flush=True)
    await asyncio.sleep(DEADLINE_S)


class _Workers:
    """All workers and supervisors of a job, played over connections to its coordinator."""

    def __init__(self, job: JobSpec, ranks: dict[Seat, int], address: tuple[str, int]) -> None:
        self._job, self._seats = job, {rank: seat for seat, rank in ranks.items()}
        self._way = ControlWay(address, Secret(SECRET))
        self._selector = selectors.DefaultSelector()
        self._number = 0
        self._due: list[tuple[float, int, float, Callable[[int], None], int]] = []  # heartbeats: a heap

    def __enter__(self) -> _Workers:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            self._supervisors = dict(zip(self._seats, pool.map(partial(self._come, "supervisor"), self._seats)))
            self._workers = dict(zip(self._seats, pool.map(partial(self._come, "worker"), self._seats)))
        for each in (*self._supervisors.values(), *self._workers.values()):
            self._selector.register(each.fileno(), selectors.EVENT_READ, each)
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self._supervisors.values(), *self._workers.values()):
            each.close()
        self._selector.close()

    def _come(self, role: str, rank: int) -> SocketControl:
        control = connect(self._way, DEADLINE_S)
        control.send(Hello(rank, role, rank, f"host{rank // HOST}"), DEADLINE_S)
        return control

    def start(self) -> None:
        """Come to the point where training begins."""
        for rank, seat in self._seats.items():
            host = f"host{rank // HOST}"
            self._say(Ready(Member(rank, seat, f"tcp://{host}:{rank}", host), 0, self._job))
        self._hear(Generation)
        for rank in self._seats:
            self._say(SurvivorReport(rank, 0, 0, "plan"))
        self._hear(Resume)
        for every_s, say in ((WORKER_BEAT_S, self._beat), (SUPERVISOR_BEAT_S, self._watch)):
            every_s = paced_s(every_s, len(self._seats), self._job.deadlines)
            now, apart_s = time.monotonic(), every_s / len(self._seats)  # spread evenly
            for place, rank in enumerate(self._seats):
                heappush(self._due, (now + apart_s * place, len(self._due), every_s, say, rank))

    def idle(self, seconds: float) -> None:
        """Say nothing but heartbeats."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._beat_and_hear(0.01)

    def _beat_and_hear(self, timeout_s: float) -> list[object]:
        """Send the heartbeats that are due. Return what is heard within ``timeout_s`` seconds."""
        while self._due and self._due[0][0] <= time.monotonic():
            at, place, every_s, say, rank = heappop(self._due)
            say(rank)
            heappush(self._due, (at + every_s, place, every_s, say, rank))
        return self._drain(timeout_s)

    def _beat(self, rank: int) -> None:
        self._number += 1
        instruction = Instruction(Op.F, self._seats[rank].stage, MicroBatch(0, 0), 1)
        self._say(Heartbeat(rank, self._number, self._number, Activity(COMPUTES, instruction), 1))

    def _watch(self, rank: int) -> None:
        self._supervisors[rank].send(SupervisorHeartbeat(rank, False, time.monotonic()), DEADLINE_S)

    def step(self, number: int, said: Iterable[OfWorker]) -> None:
        """Say what is said in step ``number``, and wait until all have heard that it is committed."""
        heard: list[object] = []
        for message in said:
            self._say(message)
            heard += self._beat_and_hear(0.0)
        self._hear(Committed, heard)

    def _say(self, message: OfWorker | Ready) -> None:
        rank = message.worker.rank
        self._workers[rank].send(message, DEADLINE_S)

    def _hear(self, kind: type, heard: Sequence[object] = ()) -> None:
        """Return once each worker has been told a message of this kind, those in ``heard`` included."""
        wanted, deadline = len(self._seats), time.monotonic() + DEADLINE_S
        while (wanted := wanted - sum(isinstance(message, kind) for message in heard)) > 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{wanted} workers have heard no {kind.__name__}")
            heard = self._beat_and_hear(0.01)

    def _drain(self, timeout_s: float) -> list[object]:
        heard = []
        for key, _ in self._selector.select(timeout_s):
            while (message := key.data.receive()) is not None:
                heard.append(message)
        return heard


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
