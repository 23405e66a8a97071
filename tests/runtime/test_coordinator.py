"""The coordinator over real connections: whose they are, and what is nobody's."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from recycle_plugin.authentication.handshake import Port, Stranger, call
from recycle_plugin.authentication.secret import Secret
from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_coordinator import (
    Answer,
    Committed,
    End,
    Generation,
    Lease,
    Over,
    Restart,
    RunFolder,
    Welcome,
)
from recycle_plugin.core.messages.from_operators import AskAdmit, AskLeave
from recycle_plugin.core.messages.from_workers import (
    Exited,
    Hello,
    Left,
    Ready,
    Stepped,
    SupervisorHeartbeat,
    Terminate,
    Through,
)
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.runtime.control.connections import ControlWay, SocketControl, connect
from recycle_plugin.runtime.control.coordinator import Coordinator
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.control.supervisor_heartbeat import HeartbeatSender
from recycle_plugin.runtime.system.accepting import PAUSE_S
from tests.support.coordinator_players import PATIENCE_S, Player, four_workers, serving
from tests.support.descriptors import none_left
from tests.support.membership import job, member
from tests.support.replaying import logging
from tests.support.secret import SECRET, way


async def heard(kind: str, said: list) -> None:
    """Returns once the coordinator has said such an event."""
    while all(event.kind != kind for event in said):
        await asyncio.sleep(0)


def warnings(said: list) -> list[str]:
    return [event.text for event in said if event.kind == "warning" and "unreadable" in event.text]


async def test_a_second_process_of_a_rank_is_turned_away_and_the_first_one_goes_on():
    said = []

    async with four_workers(said) as (coordinator, workers):
        late = Player(coordinator, 2)
        assert (await late.hear(Welcome)).incarnation == 1
        late.send(Ready(replace(member(2), incarnation=1), 0, job()))
        assert "to take a lost worker's seat, start with --join" in (await late.hear(End)).reason
        late.close()
        for rank, worker in enumerate(workers):
            worker.send(Stepped(rank, 0, 1))
        for worker in workers:
            assert (await worker.hear(Committed, End, Over)) == Committed(1)
    kinds = [event.kind for event in said]
    assert kinds.count("late") == 1 and not {"lost", "left", "end"} & set(kinds[: kinds.index("committed")])


async def test_its_time_goes_on_where_its_host_sets_its_clock_back(monkeypatch):
    """The time of its events is that of its deadlines."""
    said, times = [], []

    async with four_workers(said) as (coordinator, workers):
        monkeypatch.setattr(coordinator, "_say", lambda event, now: (said.append(event), times.append(now)))
        workers[3].close()
        await asyncio.wait_for(heard("lost", said), PATIENCE_S)
        before = time.time()
        monkeypatch.setattr(time, "time", lambda: before - 3600)
        coordinator.fail("it has to end")
        await asyncio.wait_for(heard("end", said), PATIENCE_S)
    assert times == sorted(times)


@pytest.mark.parametrize(
    "message",
    (Exited(2, 1, 0.0), Terminate(2, "a supervisor got SIGINT"), SupervisorHeartbeat(2, True)),
    ids=lambda one: type(one).__name__,
)
async def test_what_a_second_supervisor_of_a_rank_says_is_not_of_the_first_ones_worker(message):
    """A launcher that was started twice: its worker is turned away, so it ends, and its supervisor says so of the same
    rank.
    """
    said = []

    async with four_workers(said) as (coordinator, workers):
        first, second = [Player(coordinator, 2, "supervisor", process) for process in (50, 51)]
        await first.hear(Welcome)
        await second.hear(Welcome)
        second.send(message)
        assert await second.hear(Over) == Over(1), "it has nothing to wait for"
        second.close()
        for number in range(1, 4):
            for rank, worker in enumerate(workers):
                worker.send(Stepped(rank, 0, number))
            for worker in workers:
                assert await worker.hear(Committed, Generation, End) == Committed(number)
        for rank, worker in enumerate(workers):
            worker.send(Left(rank))
        assert await first.hear(Over) == Over(0)
    assert not {"lost", "terminate", "end"} & {event.kind for event in said}


async def test_what_is_unreadable_is_said_and_half_a_message_is_a_death():
    said = []

    async with four_workers(said) as (_, workers):
        workers[1].send(Ready(member(1), 0, replace(job(), stages="2")))
        workers[3].control._out.put(encode(Stepped(3, 0, 1))[:-1])
        workers[3].close()
        while len((await workers[0].hear(Generation)).members) > 2:
            pass
        await workers[1].hear_the_end()
    assert warnings(said) == [
        "the worker of rank 1 has sent an unreadable message: Ready.job.stages is '2', and it has to be int"
    ]
    assert [event.details["rank"] for event in said if event.kind == "lost"] in ([1, 3], [3, 1])


async def test_who_does_not_say_who_it_is_is_hung_up_on_and_nobody_is_lost():
    said = []

    async with four_workers(said) as (coordinator, workers):
        for _ in range(2):
            stranger = coordinator.connect()
            stranger._out.put(b"GET / HTTP/1.1\r\n\r\n")
            await InLoop(stranger).receive(PATIENCE_S)
            stranger.close()
        for rank, worker in enumerate(workers):
            worker.send(Stepped(rank, 0, 1))
        await workers[0].hear(Committed)
    assert warnings(said) == 2 * [
        "a connection from this process has sent an unreadable message: a frame begins with b'GET / HTTP', and no "
        "message does"
    ]
    assert "lost" not in [event.kind for event in said]


async def test_a_moment_without_descriptors_makes_it_deaf_for_that_moment_and_says_so_once():
    said = []

    async with serving(said) as coordinator:
        with socket.socket() as caller:
            with none_left(os.getpid()):
                caller.connect(coordinator.address)
                while not said:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(2 * PAUSE_S)
                assert len(said) == 1
            control = InLoop(SocketControl(await asyncio.to_thread(call, caller, SECRET, Port.CONTROL)))
            control.send(Hello(0, "supervisor", 1, "h"))
            assert isinstance(await control.receive(PATIENCE_S), Welcome)
            control.close()
    assert [event.text for event in said] == [
        "at the coordinator a connection could not be accepted (Too many open files); it is tried again every 0.5 s, "
        "and this is said once"
    ]


@pytest.mark.parametrize(
    "hello",
    (
        Hello(4, "worker", 1, "h"),
        Hello(-1, "placing", 1, "h"),
        Hello(1 << 900, "supervisor", 1, "h"),
        Hello(0, "king", 1, "h"),
    ),
    ids=str,
)
async def test_who_is_none_of_this_jobs_is_hung_up_on(hello):
    """Another job's worker, say, whose launcher was given this port."""
    said = []

    async with serving(said) as coordinator:
        stranger = InLoop(coordinator.connect())
        stranger.send(hello)
        assert await stranger.receive(PATIENCE_S) is None and stranger.broken is not None
        stranger.close()
    (event,) = said
    assert event.text.startswith(
        f"a connection from this process says that it is {hello.role} {hello.rank}, but this job has 4 ranks"
    )


async def test_operators_are_answered_each_request_in_its_order():
    said = []

    async with four_workers(said) as (coordinator, workers):
        operator = Player(coordinator, -1, "operator")
        assert (await operator.hear(RunFolder)).path == os.path.abspath("r")
        for request in (Over(0), AskAdmit("0.1"), AskLeave("0.1")):
            operator.send(request)
        assert await operator.hear(Answer) == Answer("the message is no request", False)
        assert await operator.hear(Answer) == Answer("seat 0.1 (rank 2) is live", False)
        assert await operator.hear(Answer) == Answer("seat 0.1 (rank 2) leaves at the next commit", True)
        assert 2 not in [each.rank for each in (await workers[0].hear(Generation)).members]
        operator.close()
    assert len(leaving(said)) == 1


def leaving(said: list) -> list:
    return [event for event in said if event.kind == "leaving"]


async def test_before_the_start_an_operator_hears_of_no_run_folder():
    async with serving([]) as coordinator:
        operator = Player(coordinator, -1, "operator")
        assert (await operator.hear(RunFolder)).path == ""
        operator.send(AskLeave("0.1"))
        assert not (await operator.hear(Answer)).done
        operator.close()


async def test_over_a_network_it_says_from_where():
    """... of each address once, and goes on answering others."""
    said = []

    async with serving(said) as coordinator:
        address = coordinator.address
        control = InLoop(await asyncio.to_thread(connect, way(address), PATIENCE_S))
        control.send(Hello(0, "supervisor", 1, "h"))
        assert isinstance(await control.receive(PATIENCE_S), Welcome)
        for _ in range(3):
            stranger = await asyncio.to_thread(socket.create_connection, address, PATIENCE_S)
            stranger.sendall(encode(Over(0)))
            with suppress(ConnectionResetError):
                assert await asyncio.to_thread(stranger.recv, 1) == b""
            stranger.close()
        with pytest.raises(
            Stranger, match="it disconnected before it had proved who it is|does not know this job's secret"
        ):
            await asyncio.to_thread(
                connect, ControlWay(address, Secret("another job's secret, of as many letters")), 1.0
            )
        control.close()
    (event,) = [event for event in said if event.kind == "stranger"]
    assert event.text.startswith("at the coordinator a caller at 127.0.0.1:")
    assert event.text.endswith(f" was refused: it begins with {encode(Over(0))[:4]!r}, which can't be understood")


async def test_what_a_process_of_the_job_says_that_is_no_message_is_said_and_hung_up_on():
    said = []

    async with serving(said) as coordinator:
        control = await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S)
        control._socket.sendall(encode(Over(0))[:4] + bytes(20))
        assert await asyncio.to_thread(control.receive, PATIENCE_S) is None and control.broken is not None
        control.close()
    (warning,) = warnings(said)
    assert warning.startswith("a connection from 127.0.0.1:") and "a frame is of version " in warning


async def test_a_supervisor_that_comes_again_takes_its_place():
    """The one before is hung up on, and its end is nobody's."""
    async with serving([], 2) as coordinator:
        other, first = Player(coordinator, 0, "supervisor"), Player(coordinator, 1, "supervisor")
        await other.hear(Welcome)
        await first.hear(Welcome)
        second = Player(coordinator, 1, "supervisor")
        await second.hear(Welcome)
        await first.hear_the_end()
        first.close()
        second.send(Exited(1, 0, 0.0))
        await second.hear(Lease)
        coordinator.fail("it has to end")
        assert await second.hear(Over) == await other.hear(Over) == Over(1)
        third = Player(coordinator, 1, "supervisor")
        await third.hear(Welcome)
        assert await third.hear(Over) == Over(1)  # which it may have missed
        for each in (other, second, third):
            each.close()
        await asyncio.wait_for(coordinator.all_gone(0.0), PATIENCE_S)


async def test_it_stays_for_a_supervisor_that_may_start_another_in_the_place_of_a_lost_worker():
    """Between the break of a worker's connection and the word of its end nobody knows whether it can be reached, and
    the others, among them rank 0's supervisor, may have gone.
    """
    said = []

    async with four_workers(said) as (coordinator, workers):
        coordinator._board.membership = logging()  # of such a job, in which a stage that nobody holds is replayed
        supervisors = [Player(coordinator, rank, "supervisor") for rank in range(4)]
        for rank, supervisor in enumerate(supervisors):
            await supervisor.hear(Welcome)
            if rank < 2:
                workers[rank].send(Through(rank))
                workers[rank].send(Left(rank, 0, step=2))
            if rank < 3:
                workers[rank].close()
                supervisor.send(Exited(rank, -9 * (rank == 2), 0.0))
                await supervisor.hear(Lease)
                supervisor.close()
        gone = asyncio.create_task(coordinator.all_gone(PATIENCE_S))
        workers[3].close()
        await asyncio.wait_for(heard("recovery", said), PATIENCE_S)
        supervisors[3].send(Exited(3, -9, 0.0))
        assert (await supervisors[3].hear(Restart, Over)).rank == 3
        assert not gone.done()
        coordinator.fail("it has to end")
        supervisors[3].close()
        await asyncio.wait_for(gone, PATIENCE_S)


def test_nobody_says_what_is_anothers_to_say_though_it_knows_the_secret():
    """Neither a worker of others, or what supervisors say, nor a supervisor of other ranks' workers; it is refused, and
    what is one's own to say still counts.
    """
    said = []
    exited = Exited(2, -9, 0.0)
    of_others = [Left(2, planned=True), Left(1, incarnation=1), Stepped(2, 0, 1), exited, Exited(1, -9, 0.0)]
    of_others += [Ready(member(2), 0, job()), Terminate(1, "I say so")]

    async def play() -> None:
        async with four_workers(said) as (coordinator, workers):
            supervisors = [Player(coordinator, rank, "supervisor") for rank in (1, 2)]
            refused = refusals(coordinator)
            for supervisor in supervisors:
                await supervisor.hear(Welcome)
            for message in of_others:
                workers[1].send(message)
            for message in (exited, Terminate(2, "I say so"), Left(1)):
                supervisors[0].send(message)
            while len(refused) < 10:
                await asyncio.sleep(0.01)
            assert not {event.kind for event in said} & {"lost", "leaving", "left", "terminate", "end", "late"}
            supervisors[1].send(exited)
            workers[2].close()
            assert 2 not in [each.rank for each in (await workers[0].hear(Generation)).members]
            for supervisor in supervisors:
                supervisor.close()

    asyncio.run(asyncio.wait_for(play(), 3 * PATIENCE_S))
    first = next(event for event in said if event.kind == "stranger")
    assert "the worker of rank 1 sent what only another may send, Left(rank=2" in first.text


async def comes(coordinator: Coordinator, hello: Hello) -> tuple[SocketControl, HeartbeatSender]:
    """A supervisor over the network, and what sends its datagrams."""
    control = await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S)
    control.send(hello)
    assert isinstance(await asyncio.to_thread(control.receive, PATIENCE_S), Welcome)
    port = coordinator._heartbeats.transport.get_extra_info("sockname")
    return control, await HeartbeatSender.to(port)


async def hears(control: SocketControl, kind: type) -> object:
    while not isinstance(message := await asyncio.to_thread(control.receive, PATIENCE_S), kind):
        assert message is not None, f"no {kind} came: {control.broken}"
    return message


def test_supervisors_that_are_gone_are_forgotten():
    """Of a job that runs for months there may be many."""

    async def play() -> None:
        async with four_workers([]) as (coordinator, _):
            for _ in range(10):
                control, sender = await comes(coordinator, Hello(2, "supervisor", 50, "h"))
                sender.close()
                control.close()
                while any(line.hello.role == "supervisor" for line in coordinator._board.lines.values()):
                    await asyncio.sleep(0.01)
            assert len(coordinator._line_of) == 1

    asyncio.run(asyncio.wait_for(play(), 3 * PATIENCE_S))


def test_a_datagram_counts_where_its_sender_could_say_the_same_over_its_connection():
    """Not of other ranks, and of a seat that was given to another host's supervisor not of the process that this one
    starts, though the former one's key is still known.
    """
    said, taken = [], []

    async def play() -> None:
        async with four_workers(said) as (coordinator, workers):
            receive, refused = coordinator.membership.receive, refusals(coordinator)
            coordinator.membership.receive = lambda message, now: taken.append(message) or receive(message, now)
            former, its = await comes(coordinator, Hello(2, "supervisor", 50, "h"))
            workers[2].close()
            former.send(Exited(2, -9, 0.0))
            await workers[0].hear(Generation)
            joined, others = await comes(coordinator, Hello(-1, "joining", 51, "elsewhere", waits=True))
            assert (await hears(joined, Restart)).worker == WorkerId(2, 1)
            forged = [(its, former, 2, 1), (its, former, 1, 0), (others, joined, 2, 0), (others, joined, 1, 0)]
            own = [(its, former, 2, 0), (others, joined, 2, 1)]
            for sender, control, rank, incarnation in (*forged * 3, *own):
                beat = SupervisorHeartbeat(rank, True, cpu_s=float(control is joined), incarnation=incarnation)
                sender.send(beat, control.datagrams)
            while len(beats()) < 2 or len(refused) < 10:
                await asyncio.sleep(0.01)
            for sender, control in ((its, former), (others, joined)):
                sender.close()
                control.close()

    def beats() -> list[SupervisorHeartbeat]:
        return [each for each in taken if isinstance(each, SupervisorHeartbeat)]

    asyncio.run(asyncio.wait_for(play(), 3 * PATIENCE_S))
    assert {(each.worker, each.cpu_s) for each in beats()} == {(WorkerId(2, 0), 0.0), (WorkerId(2, 1), 1.0)}
    first = next(event for event in said if event.kind == "stranger")
    assert "sent what only another may send, SupervisorHeartbeat(rank=2" in first.text


def refusals(coordinator: Coordinator) -> list:
    refused, refuses = [], coordinator._door.refuses
    coordinator._door.refuses = lambda peer, why: refused.append(why) or refuses(peer, why)
    return refused
