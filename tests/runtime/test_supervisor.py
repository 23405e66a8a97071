"""A supervisor whose line to the coordinator breaks, while its worker trains on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from recycle_plugin.authentication.handshake import Port, answer_in_loop
from recycle_plugin.authentication.secret import SETTING
from recycle_plugin.core.messages.from_coordinator import Fence, Lease, Over, Pace, Restart, Stay, Welcome
from recycle_plugin.core.messages.from_workers import Exited, Hello, SupervisorHeartbeat, Terminate
from recycle_plugin.core.messages.mirroring import StandsBy
from recycle_plugin.runtime.control.connections import SocketControl
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.control.supervisor_heartbeat import HeartbeatSender
from recycle_plugin.runtime.processes import supervisor, worker_keeper
from tests.support.secret import SECRET, written

PATIENCE_S = 60.0


class Worker:
    """A process that only the test sees."""

    pid = -1

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.ended: asyncio.Future = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await self.ended

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.ended.set_result(-number)


class Coordinator:
    """Welcomes the supervisor of rank 1, as often as it comes."""

    def __init__(self, listener: socket.socket, unanswered: int = 0) -> None:
        self.listener, self.unanswered = listener, unanswered
        self.line = -1
        listener.setblocking(False)

    async def accept(self) -> InLoop:
        connection, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(self.listener), PATIENCE_S)
        far = InLoop(SocketControl(await answer_in_loop(connection, SECRET, Port.CONTROL)))
        hello = await far.receive(PATIENCE_S)
        assert isinstance(hello, Hello) and (hello.rank, hello.role) == (1, "supervisor"), (
            "the first message, whatever else is to be said"
        )
        if self.unanswered:
            self.unanswered -= 1
            far.close()
            return await self.accept()
        far.send(Welcome("job", line=self.line))
        return far


async def hear(far: InLoop, kind: type) -> object:
    while not isinstance(message := await far.receive(PATIENCE_S), kind):
        assert message is not None, f"no {kind.__name__} came: {far.broken}"
    return message


@asynccontextmanager
async def supervised(monkeypatch, place: str = "1", unanswered: int = 0):
    """(coordinator, connection, worker, running supervisor); ``place``: the launcher's number of it.  The coordinator
    dies so often before it answers.
    """
    worker = Worker()

    async def spawn(*_: object) -> Worker:
        return worker

    monkeypatch.setattr(worker_keeper, "spawn", spawn)
    monkeypatch.setattr(supervisor, "SUPERVISOR_BEAT_S", 0.01)
    monkeypatch.setattr(supervisor, "END_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory() as folder:
        host, port = listener.getsockname()
        coordinator = Coordinator(listener, unanswered)
        environment = {"RANK": place, "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        environment[SETTING] = written(Path(folder, "secret"))
        here = worker_keeper.Here()
        here.rank = 1
        running = asyncio.create_task(supervisor.Supervisor(["train.py"], environment, "deepspeed", here).run())
        far = await coordinator.accept()
        await hear(far, SupervisorHeartbeat)
        yield coordinator, far, worker, running
        assert running.done()


async def test_it_comes_again_and_its_worker_does_not_notice(monkeypatch):
    async with supervised(monkeypatch) as (coordinator, far, worker, running):
        for _ in range(3):
            far.close()
            far = await coordinator.accept()
            await hear(far, SupervisorHeartbeat)
        assert worker.signals == [] and not running.done()
        far.send(Over(0))
        worker.ended.set_result(0)
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
        far.close()


async def test_who_was_to_answer_may_die_before_it_does(monkeypatch):
    async with supervised(monkeypatch, unanswered=2) as (coordinator, far, worker, running):
        assert coordinator.unanswered == 0
        far.send(Over(0))
        worker.ended.set_result(0)
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
        far.close()


async def test_the_end_of_its_worker_is_said_again_until_it_is_heard(monkeypatch):
    async with supervised(monkeypatch) as (coordinator, far, worker, running):
        worker.ended.set_result(-signal.SIGKILL)
        assert (await hear(far, Exited)).code == -signal.SIGKILL
        far.close()
        far = await coordinator.accept()
        assert (await hear(far, Exited)).code == -signal.SIGKILL
        far.send(Lease(0, 0.0))
        far.send(Over(0))
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
        far.close()


async def test_that_its_worker_is_dying_is_said_at_once_and_before_how_it_has_ended(monkeypatch):
    """For the process to be there for long after its death, nobody asks how it has ended."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    monkeypatch.setattr(Worker, "pid", pid)
    async with supervised(monkeypatch) as (_, far, worker, running):
        far.send(Pace(3600.0, 0.0))
        while await far.receive(0.5) is not None:  # until it sends no more at its old pace
            pass
        os.kill(pid, signal.SIGKILL)
        while not (await hear(far, SupervisorHeartbeat)).dying:
            pass
        os.waitpid(pid, 0)
        worker.ended.set_result(-signal.SIGKILL)
        assert (await hear(far, Exited)).code == -signal.SIGKILL
        far.send(Lease(0, 0.0))
        far.send(Over(0))
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
        far.close()


async def test_without_a_coordinator_its_worker_is_told_to_end(monkeypatch):
    monkeypatch.setattr(supervisor, "RESUME_S", 0.2)

    async with supervised(monkeypatch) as (coordinator, far, worker, running):
        coordinator.listener.close()
        far.close()
        assert await asyncio.wait_for(running, PATIENCE_S) == 1
        assert worker.signals == [signal.SIGTERM]


async def test_a_worker_that_no_signal_ends_holds_nobody_up(monkeypatch, capsys):
    """Its process may be stuck in a driver for good."""
    monkeypatch.setattr(supervisor, "KILLED_S", 0.01)
    async with supervised(monkeypatch) as (_, far, worker, running):
        worker.send_signal = worker.signals.append
        far.send(Over(0))
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
        assert worker.signals[:2] == [signal.SIGTERM, signal.SIGKILL]
        far.close()
    assert "warning: the process of rank 1 does not end, though it was killed" in capsys.readouterr().err


async def test_one_that_can_not_hear_any_more_ends_its_worker_and_says_why(monkeypatch, capsys):
    async def resume(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(InLoop, "resume", resume)
    async with supervised(monkeypatch) as (_, far, worker, running):
        far.close()
        assert await asyncio.wait_for(running, PATIENCE_S) == 1
        assert worker.signals == [signal.SIGTERM]
    line = (
        "error: the supervisor of rank 1 can't hear the coordinator any more: RuntimeError(\"can't start new thread\")"
    )
    assert line in capsys.readouterr().err


async def test_one_that_can_not_send_heartbeats_any_more_ends_its_worker_and_says_why(monkeypatch, capsys):
    def life_of(pid: int) -> tuple[str, float]:
        raise RuntimeError("unreadable")

    async with supervised(monkeypatch) as (_, far, worker, running):
        monkeypatch.setattr(supervisor, "life_of", life_of)
        assert await asyncio.wait_for(running, PATIENCE_S) == 1
        assert worker.signals == [signal.SIGTERM]
        far.close()
    line = "error: the supervisor of rank 1 can't send heartbeats any more: RuntimeError('unreadable')"
    assert line in capsys.readouterr().err


async def test_a_coordinator_that_says_nonsense_is_gone_and_the_reason_is_said(monkeypatch, capsys):
    async with supervised(monkeypatch) as (_, far, worker, running):
        far.send(b"Traceback (most recent call last):\n")
        assert await asyncio.wait_for(running, PATIENCE_S) == 1
        assert worker.signals == [signal.SIGTERM]
        far.close()
    assert (
        capsys.readouterr().err
        == "recycle: error: the coordinator has sent an unreadable message: a frame begins with b'Traceback ', and no "
        "message does\n"
    )


class Starts:
    """What a supervisor has started, and how long it has waited before: as long as the test likes."""

    def __init__(self, monkeypatch) -> None:
        self.waited: list[float] = []
        self.waits = asyncio.Event()
        self.go_on = asyncio.Event()
        self.started: asyncio.Queue[tuple[Worker, str]] = asyncio.Queue()
        self.refused = 0
        self.environment: dict[str, str] = {}  # of the last one
        monkeypatch.setattr(supervisor, "pause", self._pause)
        monkeypatch.setattr(worker_keeper, "spawn", self._spawn)

    async def _pause(self, seconds: float) -> bool:
        self.waited.append(seconds)
        self.waits.set()
        return await self.go_on.wait()

    async def _spawn(self, module: str, arguments: list[str], environment: dict[str, str]) -> Worker:
        if self.refused:
            self.refused -= 1
            raise ConnectionError("there is nobody to fork it from")
        worker, self.environment = Worker(), environment
        await self.started.put((worker, environment["RECYCLE_INCARNATION"]))
        return worker

    async def next(self, incarnation: int) -> Worker:
        worker, its = await asyncio.wait_for(self.started.get(), PATIENCE_S)
        assert its == str(incarnation)
        return worker


async def end(worker: Worker, far: InLoop, incarnation: int, code: int = -signal.SIGKILL) -> None:
    worker.ended.set_result(code)
    while (said := await hear(far, Exited)).incarnation < incarnation:
        pass  # an end that comes while a connection is resumed is said twice
    assert (said.rank, said.incarnation, said.code) == (1, incarnation, code)
    far.send(Lease(incarnation, 0.0))


async def test_it_starts_the_next_one_when_it_is_told_and_not_before(monkeypatch):
    async with supervised(monkeypatch) as (_, far, worker, running):
        starts = Starts(monkeypatch)
        await end(worker, far, 0)
        for _ in range(2):  # the same order, said twice
            far.send(Restart(1, 4.0, incarnation=3))
        far.send(Restart(0, 0.0, incarnation=7))  # another rank's
        await asyncio.wait_for(starts.waits.wait(), PATIENCE_S)
        assert starts.waited == [4.0] and starts.started.empty()
        starts.go_on.set()
        worker = await starts.next(3)
        assert (await hear(far, SupervisorHeartbeat)).incarnation == 3
        await end(worker, far, 3)
        far.send(Restart(1, 0.0, incarnation=3))  # old
        far.send(Restart(1, 0.0, incarnation=4))
        worker = await starts.next(4)
        far.send(Fence(1, "of one before", incarnation=3))
        far.send(Fence(1, "it is stuck", incarnation=4))
        assert (await hear(far, Exited)).code == -signal.SIGKILL and worker.signals == [signal.SIGKILL]
        far.send(Over(0))
        assert await asyncio.wait_for(running, PATIENCE_S) == 0 and starts.waited == [4.0]
        far.close()


async def test_an_order_that_is_taken_back_is_not_carried_out(monkeypatch):
    async with supervised(monkeypatch) as (_, far, worker, running):
        starts = Starts(monkeypatch)
        await end(worker, far, 0)
        far.send(Restart(1, 9.0, incarnation=1))
        await asyncio.wait_for(starts.waits.wait(), PATIENCE_S)
        far.send(Fence(1, "host x takes its seat", incarnation=1))
        starts.go_on.set()
        assert (await hear(far, Exited)).incarnation == 1, "or nobody knows that its host is there"
        far.send(Restart(1, 0.0, incarnation=1))
        far.send(Fence(1, "its host is gone", incarnation=2))
        far.send(Restart(1, 0.0, incarnation=2))  # both have waited for a line that was cut
        while (said := await hear(far, Exited)).incarnation == 1:
            pass  # it is said until it is answered
        assert (said.incarnation, said.code) == (2, -signal.SIGKILL)
        far.send(Restart(1, 0.0, incarnation=3))
        await starts.next(3)
        far.send(Fence(1, "the job is over", incarnation=3))
        far.send(Over(0))
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
        far.close()


async def test_one_that_cannot_be_started_has_died(monkeypatch, capsys):
    async with supervised(monkeypatch) as (_, far, worker, running):
        starts = Starts(monkeypatch)
        starts.refused = 1
        await end(worker, far, 0)
        far.send(Restart(1, 0.0, incarnation=1))
        said = await hear(far, Exited)
        assert (said.incarnation, said.code) == (1, 1)
        far.send(Restart(1, 0.0, incarnation=2))
        worker = await starts.next(2)
        far.send(Over(0))
        assert await asyncio.wait_for(running, PATIENCE_S) == 0 and worker.signals == [signal.SIGTERM]
        far.close()
    assert capsys.readouterr().err == "recycle: warning: there is nobody to fork it from\n"


async def test_the_jobs_end_comes_before_the_next_start(monkeypatch):
    async with supervised(monkeypatch) as (_, far, worker, running):
        starts = Starts(monkeypatch)
        await end(worker, far, 0, code=3)
        far.send(Restart(1, 9.0, incarnation=1))
        await asyncio.wait_for(starts.waits.wait(), PATIENCE_S)
        far.send(Over(1))
        assert await asyncio.wait_for(running, PATIENCE_S) == 3, "its script's own error, as ever"
        assert starts.started.empty()
        far.close()


async def test_who_has_left_as_planned_may_come_back(monkeypatch):
    """... again and again: its supervisor stays, and knows that it is to before it hears the answer."""
    async with supervised(monkeypatch) as (_, far, worker, running):
        starts = Starts(monkeypatch)
        for incarnation in range(3):
            far.send(Stay(1, incarnation=incarnation))
            await end(worker, far, incarnation, code=0)
            far.send(Restart(1, 0.0, incarnation=incarnation + 1))
            worker = await starts.next(incarnation + 1)
        await end(worker, far, 3, code=0)
        assert await asyncio.wait_for(running, PATIENCE_S) == 0, "its script is through"
        far.close()


async def test_who_has_left_as_planned_goes_with_the_job(monkeypatch):
    async with supervised(monkeypatch) as (_, far, worker, running):
        far.send(Stay(1))
        await end(worker, far, 0, code=0)
        far.send(Over(0))
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
        far.close()


@pytest.mark.parametrize("rank, goes", [("1", True), ("0", False)])
async def test_a_signal_ends_a_supervisor_whose_worker_has_left_alone(monkeypatch, rank, goes):
    """But for the launcher's first process, by which people stop the job; and before it has left it is the job's."""
    handlers: list = []
    monkeypatch.setattr(worker_keeper.Here, "on_signal", lambda self, told: handlers.append(told))

    async with supervised(monkeypatch, place=rank) as (_, far, worker, running):
        far.send(Stay(1))
        (told,) = handlers
        told("SIGTERM")
        assert (await hear(far, Terminate)).rank == 1
        await end(worker, far, 0, code=0)
        await asyncio.wait_for(told.__self__._answered.wait(), PATIENCE_S)
        told("SIGTERM")
        if not goes:
            assert (await hear(far, Terminate)).rank == 1
            far.send(Over(0))
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
        far.close()


async def test_it_follows_the_coordinator_to_another_host(monkeypatch):
    """Heartbeats go there, and the next worker is started for there."""
    async with supervised(monkeypatch) as (coordinator, far, worker, running):
        starts = Starts(monkeypatch)
        starts.go_on.set()
        with socket.create_server(("127.0.0.2", 0)) as listener:
            address = listener.getsockname()
            far.send(Welcome("job", line=3))  # its number is known from now on
            far.send(StandsBy(1, *address, 1.0))
            await hear(far, SupervisorHeartbeat)
            coordinator.listener.close()
            far.close()
            elsewhere = Coordinator(listener)
            elsewhere.line = 3
            there = await elsewhere.accept()
            await hear(there, SupervisorHeartbeat)
            await end(worker, there, 0)
            there.send(Restart(1, 0.0, incarnation=1))
            worker = await starts.next(1)
            wanted = {
                "MASTER_ADDR": address[0],
                "MASTER_PORT": str(address[1]),
                "RECYCLE_COORDINATOR": "{}:{}".format(*address),
            }
            assert wanted.items() <= starts.environment.items()
            there.send(Over(0))
            await end(worker, there, 1)
            assert await asyncio.wait_for(running, PATIENCE_S) == 0
            there.close()


async def test_it_reports_by_datagram_only_while_its_connection_is_held_up(monkeypatch):
    async with supervised(monkeypatch) as (coordinator, far, worker, running):
        with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
            datagrams.setblocking(False)
            far.send(Pace(0.5, 60.0))  # kernels put an acknowledgement off for up to 0.2 s
            it = running.get_coro().cr_frame.f_locals["self"]
            while it._every_s != 0.5:
                await hear(far, SupervisorHeartbeat)
            await hear(far, SupervisorHeartbeat)
            datagrams.bind(coordinator.listener.getsockname())
            for _ in range(3):
                await hear(far, SupervisorHeartbeat)
            with pytest.raises(BlockingIOError):
                datagrams.recv(1000)
            far._leave()  # it reads no more
            while it._control._control.send(Terminate(1, "x" * 500_000, "a host")):
                pass
            received = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(datagrams, 1000), PATIENCE_S)
            assert received
        far.send(Over(0))
        worker.ended.set_result(0)
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
        far.close()


async def test_a_host_that_has_no_route_for_a_while_reports_on(monkeypatch):
    """As one whose interface is down when its connection is first held up."""
    to, tried = HeartbeatSender.to, []

    async def without_a_route_at_first(address: tuple[str, int]) -> HeartbeatSender:
        tried.append(address)
        return await to(address if len(tried) > 1 else ("255.255.255.255", 9))  # which no datagram may be sent to

    monkeypatch.setattr(HeartbeatSender, "to", without_a_route_at_first)
    async with supervised(monkeypatch) as (coordinator, far, worker, running):
        with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
            datagrams.setblocking(False)
            datagrams.bind(coordinator.listener.getsockname())
            it = running.get_coro().cr_frame.f_locals["self"]
            far._leave()  # it reads no more
            while it._control._control.send(Terminate(1, "x" * 500_000, "a host")):
                pass
            received = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(datagrams, 1000), PATIENCE_S)
            assert received and len(tried) == 2
        far.send(Over(0))
        worker.ended.set_result(0)
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
        far.close()
