"""Real guards, supervisors and workers that train nothing, around a coordinator of the test's own: who starts whom
again, and who takes whose seat.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from recycle_plugin.authentication.secret import SETTING
from recycle_plugin.core.coordinator import losses
from recycle_plugin.core.coordinator.facts import restarts
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, Event
from recycle_plugin.core.coordinator.lines import Effects
from recycle_plugin.core.messages.from_operators import AskAdmit, AskLeave
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.launch import Join, free_port
from recycle_plugin.runtime.control import connections
from recycle_plugin.runtime.control.coordinator import Coordinator
from recycle_plugin.runtime.processes import supervisor
from recycle_plugin.runtime.processes.guard import Guard
from tests.support.secret import SECRET, written

PATIENCE_S = 60.0
RANKS = 2


class Job:
    """A job whose workers are started by real guards, each in a session of its own; ``said``: all events."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        written(folder / "secret")
        self.guards: list[int] = []
        self.said: list[Event] = []
        self.news: asyncio.Event
        self.coordinator: Coordinator

    def start(self, rejoin: str, *what: str, ranks: int = RANKS) -> None:
        for rank in range(ranks):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": self.port}
            self._hold({**place, "MASTER_ADDR": "127.0.0.1", "LOCAL_SIZE": ranks}, rejoin, *what)

    def join(self, rejoin: str, waits: bool = True) -> int:
        """Another host's guard, which asks for a lost seat; returns its process."""
        environment = Join("127.0.0.1", self.port, waits, []).environment({})
        return self._hold(environment, rejoin, joins=waits)

    def _hold(self, place: dict, *arguments: str, joins: bool | None = None) -> int:
        pid = os.fork()
        if pid == 0:
            code: Any = 99
            try:
                os.setsid()
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the coordinator's connections among them
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # pytest's have been closed
                variables = dict(os.environ) | {name: str(value) for name, value in place.items()}
                variables["RANK"] = str(place.get("RANK", 1))
                variables[SETTING] = str(self.folder / "secret")
                if joins is not None:
                    del variables["RANK"]
                # a coordinator that is not the guard's own: rank 0's guard has no host
                code = held([str(self.folder), *arguments], variables, joins)
            finally:
                os._exit(code)
        self.guards.append(pid)
        return pid

    @asynccontextmanager
    async def playing(self, *given: str) -> AsyncIterator[None]:
        self.start(*given)
        self.news = asyncio.Event()
        self.coordinator = Coordinator(RANKS, self._hear, SECRET)
        await self.coordinator.start("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.hear("resume")
                yield
        except TimeoutError:
            raise AssertionError("\n".join(event.text for event in self.said)) from None
        finally:
            await self.coordinator.close()

    def _hear(self, event: Event, now: float) -> None:
        self.said.append(event)
        self.news.set()

    async def hear(self, kind: str, count: int = 1, **details: object) -> Event:
        """The ``count``-th event of this kind with these details, once it has been said."""
        while len(found := self.of(kind, **details)) < count:
            self.news.clear()
            await self.news.wait()
        return found[count - 1]

    def of(self, kind: str, **details: object) -> list[Event]:
        return [e for e in self.said if e.kind == kind and details.items() <= e.details.items()]

    async def over(self) -> list[int]:
        """Ends the job at a commit; the guards' exit codes."""
        self.coordinator.terminate("the test is through")
        await self.coordinator.all_gone(PATIENCE_S)
        return [await self.code(pid) for pid in self.guards]

    async def code(self, pid: int) -> int:
        """The exit code of a guard, once it has ended."""
        return os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1])

    def child(self, guard: int, name: str) -> psutil.Process:
        (found,) = [each for each in psutil.Process(guard).children() if _name(each) == name]
        return found

    def record(self, rank: int, incarnation: int) -> dict:
        return json.loads((self.folder / f"rank{rank}.{incarnation}.json").read_text())

    @property
    def vacancies(self) -> Any:
        return self.coordinator.membership.state.vacancies

    def left(self) -> list[str]:
        """Processes of the guards' sessions that still run."""
        own = [each for each in psutil.process_iter() if _session(each.pid) in self.guards]
        return [f"{each.pid} {each.name()}" for each in own if each.status() != psutil.STATUS_ZOMBIE]


def held(command: list[str], variables: dict[str, str], joins: bool | None) -> int:
    return Guard(lambda line: supervisor.supervise(command, variables, lambda _: "deepspeed", joins, line), None).hold()


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@pytest.fixture
def job(monkeypatch, tmp_path) -> Iterator[Job]:
    """Of two workers; there is no back-off, and nothing of it is left at the end."""
    monkeypatch.setattr(restarts, "FIRST_S", 0.0)
    monkeypatch.setattr(supervisor, "WORKER", "tests.support.tiny_worker")
    made = Job(tmp_path)
    yield made
    left = made.left()
    for one in left:
        os.kill(int(one.split()[0]), signal.SIGKILL)
    assert not left, left


async def test_a_killed_worker_is_started_again_by_its_own_supervisor(job):
    """... and so is one that dies before it was admitted.  The job ends as if they had stayed away."""
    async with job.playing("always"):
        for incarnation in range(3):
            started = await job.hear("worker", rank=1, incarnation=incarnation)
            if incarnation:
                back = await job.hear("newcomer", rank=1, incarnation=incarnation)
                assert back.text.startswith("seat 1.0 (rank 1) on h comes back, as process")
            os.kill(started.details["pid"], signal.SIGKILL)
            again = await job.hear("restart", incarnation=incarnation)
            assert again.details == {"rank": 1, "incarnation": incarnation, "after_s": 0.0, "in_vain": incarnation}
            assert "its process was killed by signal 9 (SIGKILL)" in again.text
        await job.hear("newcomer", rank=1, incarnation=3)
        assert await job.over() == [0, 0]
    assert len(job.of("lost")) == 1 and not job.of("late") and not job.of("left", rank=1)
    assert job.of("finished") and not job.of("end")
    assert len({job.record(1, incarnation)["pid"] for incarnation in range(4)}) == 4


async def test_no_worker_is_started_again_where_nobody_wants_that(job):
    async with job.playing("never"):
        os.kill(job.record(1, 0)["pid"], signal.SIGKILL)
        await job.hear("resume", 2)
        assert await job.over() == [0, 0]
    assert len(job.of("worker")) == 2 and not job.of("restart") and not job.of("not_restarted")


def act(coordinator: Coordinator, output: CoordinatorOutput) -> None:
    """Have the coordinator do what its state machine has said."""
    effects = Effects()
    coordinator._board.act(output, 0.0, effects)
    coordinator._release(effects)


async def test_who_is_fenced_is_started_again_once_it_is_dead(job):
    async with job.playing("always"):
        state = job.coordinator.membership.state
        losses.give_up(state, WorkerId(1), Cause.STUCK, "it is stuck")
        act(job.coordinator, state.taken_out())
        assert not job.of("restart"), "its process runs still"
        await job.hear("newcomer", rank=1, incarnation=1)
        assert await job.over() == [0, 0]
    assert [event.kind for event in job.said if event.kind in ("lost", "confirmed", "restart", "newcomer")] == [
        "lost",
        "confirmed",
        "restart",
        "newcomer",
    ]


async def test_who_keeps_dying_is_given_up(job):
    async with job.playing("always", "die"):
        os.kill(job.record(1, 0)["pid"], signal.SIGKILL)
        given_up = await job.hear("not_restarted")
        assert given_up.details == {"rank": 1, "incarnation": 5, "in_vain": 5}
        assert "5 processes in a row died before being admitted. Its process exited with code 1" in given_up.text
        assert await job.over() == [0, 0]
    assert [event.details["in_vain"] for event in job.of("restart")] == [0, 1, 2, 3, 4]


async def test_who_has_left_as_planned_is_started_again_by_the_next_supervisor_too(job):
    """Which was not there when somebody asked for that first."""

    def asked(kind: type) -> str:
        answer, out = job.coordinator.membership.asked(kind("1.0"), 0.0)
        act(job.coordinator, out)
        return answer.text

    async with job.playing("never"):
        assert asked(AskLeave) == "seat 1.0 (rank 1) leaves at the next commit"
        await job.hear("left", rank=1)
        before = job.child(job.guards[1], "recycle-super")
        os.kill(before.pid, signal.SIGSTOP)
        job.coordinator._told[job.coordinator._board._supervisors[1]].close()
        while job.vacancies._seats[1].absent_since is None:
            await asyncio.sleep(0)
        assert asked(AskAdmit).startswith("seat 1.0: no process is left on host h to start it")
        before.kill()
        while job.vacancies._seats[1].absent_since is not None:
            await asyncio.sleep(0.01)
        assert asked(AskAdmit) == "seat 1.0: its supervisor starts it again"
        await job.hear("newcomer", rank=1, incarnation=1)
        assert await job.over() == [0, 0]
    assert len(job.of("left", rank=1)) == 1 and not job.of("lost")


async def test_the_next_supervisor_starts_the_next_worker(job):
    """It was killed while its worker ran, and then in the back-off."""
    async with job.playing("always"):
        before = job.child(job.guards[1], "recycle-super")
        before.kill()
        await asyncio.to_thread(psutil.wait_procs, [before], PATIENCE_S)
        restarts.FIRST_S = 3600.0
        os.kill(job.record(1, 0)["pid"], signal.SIGKILL)
        await job.hear("restart", incarnation=0)
        job.vacancies._seats[1].vacancy.due = 0.0
        job.child(job.guards[1], "recycle-super").kill()
        await job.hear("newcomer", rank=1, incarnation=1)
        assert await job.over() == [0, 0]
    assert len(job.of("restart")) == 1


async def test_a_supervisor_that_was_killed_while_the_newcomer_waits_costs_nothing(job):
    async with job.playing("always"):
        os.kill(job.record(1, 0)["pid"], signal.SIGKILL)
        await job.hear("newcomer", rank=1, incarnation=1)
        job.child(job.guards[1], "recycle-super").kill()
        os.kill(job.record(1, 1)["pid"], signal.SIGKILL)
        await job.hear("newcomer", rank=1, incarnation=2)
        assert await job.over() == [0, 0]
    assert not job.of("end")


async def test_nobody_is_left_to_start_it_where_its_guard_was_killed_and_another_host_takes_the_seat(job):
    async with job.playing("always"):
        os.kill(job.guards[1], signal.SIGKILL)
        alone = await job.hear("not_restarted", rank=1)
        assert "its guard is gone" in alone.text and "--join takes its seat" in alone.text
        job.join("always")
        await job.hear("newcomer", rank=1, incarnation=1)
        assert await job.over() == [0, -signal.SIGKILL, 0]
    assert [event.details["rank"] for event in job.of("joined")] == [1]
    found = job.record(1, 1)
    assert found == found | {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
        "RECYCLE_INCARNATION": "1",
        "RECYCLE_COORDINATOR": f"127.0.0.1:{job.port}",
    }


async def test_a_host_that_is_gone_without_a_word_leaves_a_seat(job):
    """Guard and supervisor are killed at once: nobody says how the worker has ended."""
    async with job.playing("always"):
        spare = job.join("always")
        await job.hear("spare")
        job.vacancies._absent_s = 0.5
        theirs = job.child(job.guards[1], "recycle-super")
        theirs.suspend()  # it must not see what becomes of its guard
        os.kill(job.guards[1], signal.SIGKILL)
        theirs.kill()
        await job.hear("joined")
        job.vacancies._absent_s = PATIENCE_S  # the new supervisor may be slow
        await job.hear("newcomer", rank=1, incarnation=1)
        assert job.child(spare, "recycle-super")
        assert await job.over() == [0, -signal.SIGKILL, 0]
    assert not job.of("confirmed") and not job.of("restart") and len(job.of("joined")) == 1


async def test_a_spare_takes_the_next_loss_and_the_seats_own_supervisor_stays(job):
    """A spare whose supervisor is killed waits again; one that nobody needs ends with the job, well."""
    async with job.playing("always"):
        first = job.join("always")
        await job.hear("spare")
        job.child(first, "recycle-super").kill()
        await job.hear("spare", 2)
        job.join("always")
        await job.hear("spare", 3)
        os.kill(job.record(1, 0)["pid"], signal.SIGKILL)
        await job.hear("newcomer", rank=1, incarnation=1)
        pid = job.record(1, 1)["pid"]
        assert psutil.Process(pid).ppid() == first, "the one that has waited longest"
        os.kill(pid, signal.SIGKILL)
        await job.hear("newcomer", rank=1, incarnation=2)
        assert await job.over() == [0, 0, 0, 0]
    assert len(job.of("joined")) == 2 and not job.of("restart")


async def test_a_seat_that_is_about_to_be_filled_is_taken_where_no_other_is_free(job):
    restarts.FIRST_S = 3600.0

    async with job.playing("always"):
        os.kill(job.record(1, 0)["pid"], signal.SIGKILL)
        await job.hear("restart", rank=1)
        job.join("always", waits=False)
        await job.hear("newcomer", rank=1, incarnation=2)
        assert await job.over() == [0, 0, 0]
    assert not (job.folder / "rank1.1.json").exists(), "its own supervisor has started nothing"


async def test_without_a_seat_who_does_not_wait_hears_so(job, capfd):
    async with job.playing("always"):
        assert await job.code(job.join("always", waits=False)) == 1
        job.guards.pop()
        assert await job.over() == [0, 0]
    assert "recycle: error: no seat is free, and --no-wait was given\n" in capfd.readouterr().err


async def test_a_job_that_is_over_has_no_seat(job, capfd):
    async with job.playing("never"):
        assert await job.over() == [0, 0]
        assert await job.code(job.join("never")) == 1
        job.guards.pop()
    assert "recycle: error: the job is over\n" in capfd.readouterr().err


def test_who_joins_where_nobody_is_hears_so(job, capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "JOIN_S", 0.1)
    monkeypatch.setattr(connections, "ATTEMPT_S", 0.1)

    async def scene() -> None:
        pid = job.join("always")
        assert await job.code(pid) == 1

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
    said = capfd.readouterr().err
    assert f"recycle: error: nothing answers at 127.0.0.1:{job.port} (" in said
    assert "write the address and port of the job's master behind --join, and see whether the job still runs\n" in said


def test_who_joins_what_is_no_coordinator_hears_so(job, capfd):
    async def scene() -> None:
        async def answer(reader, writer) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        async with await asyncio.start_server(answer, "127.0.0.1", job.port):
            assert await job.code(job.join("always")) == 1

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
    assert (
        f"recycle: error: 127.0.0.1:{job.port} answers, but is no coordinator of this job (" in capfd.readouterr().err
    )


async def test_nothing_grows_over_20_restarts(job):
    """Descriptors and threads of the guard, its supervisor and the coordinator's process."""
    async with job.playing("20", "die"):
        guard, theirs = job.guards[1], job.child(job.guards[1], "recycle-super").pid
        os.kill(job.record(1, 0)["pid"], signal.SIGKILL)
        counted = []
        for count in (3, 20):
            # with the order for the next start each of them is through with the one before
            await job.hear("restart", count)
            counted.append([_open(pid) for pid in (guard, theirs, os.getpid())])
        await job.hear("not_restarted")
        assert job.child(guard, "recycle-super").pid == theirs
        counted.append([_open(pid) for pid in (guard, theirs, os.getpid())])
        assert all(now <= before + 1 for before, now in zip(_flat(counted[0]), _flat(counted[1]))), counted
        assert _flat(counted[2]) <= _flat(counted[0]), counted
        assert await job.over() == [0, 0]
    assert len(job.of("restart")) == 20


def _open(pid: int) -> tuple[int, int]:
    process = psutil.Process(pid)
    return process.num_fds(), process.num_threads()


def _flat(counts: list[tuple[int, int]]) -> list[int]:
    return [number for pair in counts for number in pair]
