"""Carries the messages of ``core.membership`` over TCP; lives in the supervisor of rank 0, imports no torch.

Each worker and each supervisor holds one connection.  A worker's death shows twice: its supervisor
sees the process end and knows how, and its connection closes.  What it said before it died is read
to the end first, because a number that it contributed to a finished step still counts.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import Callable

from recycle_plugin.core.membership import Membership
from recycle_plugin.core.output import SUPERVISORS, WORKERS, Event, Output
from recycle_plugin.core.placement import spread
from recycle_plugin.core.protocol import Exited, Heard, Hello, Left, Over, Placed, Ready, Welcome, decode, encode
from recycle_plugin.core.roster import WorkerId
from recycle_plugin.core.watch import TICK_S
from recycle_plugin.runtime import pulse


LAST_WORDS_S = 0.2  # how long what a dead worker has said may be under way
CLOSING_S = 5.0  # how long closed connections may take to be noticed


class Coordinator:
    """The server; ``say(event, now)`` gets every event."""

    def __init__(self, ranks: int, store_port: int, say: Callable[[Event, float], None]) -> None:
        self._gone = asyncio.Event()
        self._over = asyncio.Event()
        self._last_word: Over | None = None
        self._serving: dict[asyncio.Task, asyncio.StreamWriter] = {}
        self._membership = Membership(ranks)
        self._ranks = ranks
        self._placing: dict[int, tuple[str, asyncio.StreamWriter]] = {}  # by place: the host of a supervisor that asks for its rank
        self._welcome = Welcome(store_port, time.strftime("recycle-%Y%m%d-%H%M%S"))
        self._say = say
        self._come: Counter[int] = Counter()  # how many workers of a rank have
        self._workers: dict[WorkerId, asyncio.StreamWriter] = {}
        self._supervisors: dict[int, asyncio.StreamWriter] = {}  # by rank
        self._supervised: set[int] = set()  # ranks that have, or have had, one
        self._exits: dict[WorkerId, Exited] = {}
        self._regroup_timeout_s = 120.0
        self._watched = -1
        self._server: asyncio.Server | None = None
        self._pulses: asyncio.DatagramTransport | None = None
        self._ticking: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen; OSError when the port is taken."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=1 << 24)
        self._pulses = await pulse.listen((host, port), self._take)
        self._tick()

    async def all_gone(self, goodbye_s: float) -> None:
        """Return when every supervisor that can be reached has closed its connection, ``goodbye_s`` after the end of the job at the latest."""
        if not self._supervisors:
            return
        gone, over = asyncio.create_task(self._gone.wait()), asyncio.create_task(self._over.wait())
        await asyncio.wait({gone, over}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({gone}, timeout=goodbye_s)
        gone.cancel()
        over.cancel()

    def fail(self, text: str) -> None:
        """End the job for everybody, with this line."""
        self._act(self._membership.fail(text))

    async def close(self) -> None:
        """Close every connection and wait for those that serve them: cancelled later, they would say so."""
        if self._server is not None:
            self._server.close()
            self._pulses.close()
            self._ticking.cancel()
        for writer in self._serving.values():
            writer.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=CLOSING_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._serving[task] = writer
        try:
            await self._converse(reader, writer)
        finally:
            del self._serving[task]
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = decode(await reader.readline())
        if not isinstance(hello, Hello):
            return
        if hello.role == "placing":
            self._place(hello, writer)
            await reader.read()  # until it has its answer, and goes
        elif hello.role == "worker":
            await self._attend_worker(hello, reader, writer)
        else:
            await self._attend_supervisor(hello, reader, writer)

    async def _attend_worker(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = self._greet(hello, writer)
        if self._membership.ended is not None:  # it comes too late: the job has ended meanwhile
            writer.write(encode(self._membership.ended))
        await self._hear(hello, reader)
        self._workers.pop(worker, None)
        self._worker_closed(worker)

    async def _attend_supervisor(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(self._welcome))
        if self._last_word is not None:
            writer.write(encode(self._last_word))
        if hello.rank in self._supervised:  # of a launcher that was started twice, whose worker is turned away: it knows nothing of the first one's
            writer.write(encode(Over(1)))
            await reader.read()
            return
        self._supervised.add(hello.rank)
        self._supervisors[hello.rank] = writer
        await self._hear(hello, reader)
        self._supervisors.pop(hello.rank, None)
        self._supervisor_closed()

    def _greet(self, hello: Hello, writer: asyncio.StreamWriter) -> WorkerId:
        """Ranks are given out by the launcher, incarnations here, where all workers come by."""
        worker = WorkerId(hello.rank, self._come[hello.rank])
        self._come[hello.rank] += 1
        self._workers[worker] = writer
        writer.write(encode(replace(self._welcome, incarnation=worker.incarnation)))
        turned_away = self._membership.greet(worker, hello.host)
        if not turned_away.events:
            self._say(Event("worker", f"worker {hello.rank} is process {hello.pid} on {hello.host}", {"rank": hello.rank, "pid": hello.pid}), time.time())
        self._act(turned_away)
        return worker

    async def _hear(self, hello: Hello, reader: asyncio.StreamReader) -> None:
        """Until the connection is closed."""
        try:
            while (line := await reader.readline()).endswith(b"\n"):  # half a line is the last of who dies
                self._take(decode(line))
        except ConnectionError:
            pass
        except ValueError as error:  # a connection that speaks nonsense is as good as closed
            self._say(Event("warning", f"{hello.role} {hello.rank} says what can't be understood: {error}", {"rank": hello.rank}), time.time())
        except Exception as error:
            self.fail(f"the coordinator met an error of its own ({error!r})")
            raise

    def _place(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        """Once the hosts of all are known, each gets the rank of its worker."""
        self._placing[hello.rank] = hello.host, writer
        if len(self._placing) == self._ranks:
            places = [self._placing[place] for place in range(self._ranks)]
            for rank, (_, each) in zip(spread([host for host, _ in places]), places):
                each.write(encode(Placed(rank)))

    def _take(self, message: object) -> None:
        if isinstance(message, Exited) and message.rank in self._supervisors:
            self._supervisors[message.rank].write(encode(Heard(0, 0.0)))
        if isinstance(message, Exited) and message.worker in self._workers:
            self._exits[message.worker] = message
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._closed_by_exit, message.worker)
            return
        if isinstance(message, Ready):
            self._regroup_timeout_s = message.job.regroup_timeout_s
        self._act(self._membership.receive(message, time.time()))
        if isinstance(message, Left):
            self._workers.pop(message.worker, None)

    def _supervisor_closed(self) -> None:
        if self._server.is_serving() and self._supervisors.keys() <= {worker.rank for worker in self._membership.unreachable}:
            self._gone.set()

    def _worker_closed(self, worker: WorkerId) -> None:
        if not self._server.is_serving():
            return  # it was this side that closed
        exited = self._exits.pop(worker, None)
        now = time.time()
        self._act(self._membership.receive(exited, now) if exited else self._membership.connection_lost(worker, now))

    def _closed_by_exit(self, worker: WorkerId) -> None:
        """The connection outlived its process, since some child of the script has inherited it."""
        exited = self._exits.pop(worker, None)
        if exited is not None:
            self._act(self._membership.receive(exited, time.time()))

    def _act(self, output: Output) -> None:
        now = time.time()
        for whom, message in output.messages:
            self._send(whom, message)
        for event in output.events:
            self._say(event, now)
        self._watch_regrouping()

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._act(self._membership.tick(time.time()))

    def _send(self, whom: str | WorkerId, message: object) -> None:
        line = encode(message)
        for writer in self._writers(whom):
            writer.write(line)
        if isinstance(message, Over):
            self._last_word = message
            self._over.set()

    def _writers(self, whom: str | WorkerId) -> list[asyncio.StreamWriter]:
        if whom == SUPERVISORS:
            return list(self._supervisors.values())
        if whom == WORKERS:  # what is for a lost one that does not read would pile up here
            return [writer for worker, writer in self._workers.items() if worker not in self._membership.lost]
        return [self._workers[whom]] if whom in self._workers else []

    def _watch_regrouping(self) -> None:
        number = self._membership.regrouping
        if number is not None and number != self._watched:
            self._watched = number
            asyncio.get_running_loop().call_later(self._regroup_timeout_s, self._regroup_overdue, number)

    def _regroup_overdue(self, number: int) -> None:
        if self._membership.regrouping == number:
            self._act(self._membership.regroup_overdue(self._regroup_timeout_s))
