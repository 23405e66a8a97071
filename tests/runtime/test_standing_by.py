"""The standby on another host: who turns to it, before and after it takes the coordinator's place."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from recycle_plugin.authentication.secret import SecretFile
from recycle_plugin.core.coordinator.mirror import GONE_S, LATER_S, Known
from recycle_plugin.core.coordinator.state_dump import dump
from recycle_plugin.core.coordinator.switchboard import Switchboard
from recycle_plugin.core.messages.from_coordinator import Placed
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.mirroring import Got, SentBack, Snapshot, Taken
from recycle_plugin.runtime.control.connections import SocketControl, connect
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.control.in_process import InProcess
from recycle_plugin.runtime.processes import standing_by
from recycle_plugin.runtime.processes.guard import Pipe
from recycle_plugin.runtime.processes.standing_by import Candidate
from tests.support.secret import way

PATIENCE_S = 60.0


@asynccontextmanager
async def candidate() -> AsyncIterator[Candidate]:
    """A standby that listens; the coordinator that it follows says nothing."""
    control = InLoop(InProcess(lambda far: None))
    made = Candidate(way(("127.0.0.1", 1)), control, "127.0.0.1")
    made.entrance.open()
    try:
        yield made
    finally:
        await made.entrance.close()
        control.close()


async def turns_to(made: Candidate, *words: object) -> SocketControl:
    control = await asyncio.to_thread(connect, way(made.entrance.address), PATIENCE_S)
    for word in words:
        control.send(word)
    return control


async def test_who_turns_while_the_coordinator_goes_on_is_sent_back_and_counts_no_more(monkeypatch):
    monkeypatch.setattr(standing_by, "TURNED_S", 0.05)
    board = Switchboard(4, "a job", 0.0, "h")
    async with candidate() as made:
        made._learn(known := Known(board, 1))
        end = await turns_to(made, Hello(1, "worker", 71, "h", line=1))
        while not list(made._turned):
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(end.receive, 0.5) is None and list(made._turned), "the coordinator is silent"
        known.count += 1  # and goes on
        assert await asyncio.to_thread(end.receive, PATIENCE_S) == SentBack() and not list(made._turned)
        end.close()


async def test_who_has_turned_is_sent_back_by_one_that_never_leads():
    async with candidate() as made:
        end = await turns_to(made, Hello(1, "worker", 71, "h", line=1))
        while not list(made._turned):
            await asyncio.sleep(0.01)
        made.send_all_back()
        assert await asyncio.to_thread(end.receive, PATIENCE_S) == SentBack()
        end.close()


@pytest.mark.parametrize("first", ("the news", "the election"))
async def test_once_elected_it_takes_in_and_confirms_nothing_more(first, monkeypatch):
    """The coordinator would let it out, perhaps a membership without those that have turned, and go on with that.
    ``first``: news that is read in the same turn of the loop as the election is not taken in either.
    """
    fars: list[InProcess] = []
    control = InLoop(InProcess(fars.append))
    made = Candidate(way(("127.0.0.1", 1)), control, "127.0.0.1")
    made.entrance.open()
    elected = asyncio.create_task(made.elected())
    try:
        fars[0].send(Snapshot(json.dumps(dump(Switchboard(4, "a job", 0.0, "h"))).encode(), True, 1))
        while made._known is None or not isinstance(fars[0].receive(), Got):
            await asyncio.sleep(0.01)
        monkeypatch.setattr(Known, "is_elected", lambda self, port, turned: True)
        if first == "the election":
            made._count()
        fars[0].send(Taken("tick", 1.0, waits=True))
        if first == "the news":  # timers that are due come last in a turn: the news is read, but not taken in yet
            asyncio.get_running_loop().call_later(0.0, made._count)
        known = await asyncio.wait_for(elected, PATIENCE_S)
        assert known is not None and known.count == 1 and fars[0].receive(0.1) is None
    finally:
        await made.entrance.close()
        control.close()


@pytest.mark.parametrize(
    "hangs, silent, gone_s", ((True, False, LATER_S), (False, False, GONE_S), (True, True, 0.0), (False, True, 0.0))
)
async def test_who_is_elected_waits_for_the_old_hosts_ends_as_long_as_they_may_take(
    hangs, silent, gone_s, monkeypatch, tmp_path
):
    """As the coordinator was at the election, whose connection is closed then."""
    fars: list[InProcess] = []
    made = Candidate(way(("127.0.0.1", 1)), InLoop(InProcess(fars.append)), "127.0.0.1")
    made.entrance.open()
    led: list[float] = []

    async def at(way: object) -> Candidate:
        return made

    async def lead(*given: object) -> str:
        led.append(given[5])
        return "leads"

    monkeypatch.setattr(Candidate, "at", at)
    monkeypatch.setattr(standing_by.Hosted, "lead", lead)
    monkeypatch.setattr(standing_by, "call_this", lambda name: None)
    elects = {
        True: lambda self, port, turned: bool(list(turned)),
        False: lambda self, port, turned: made._control.broken is not None,
    }
    monkeypatch.setattr(Known, "is_elected", elects[hangs])
    (near, far), reader = socket.socketpair(), asyncio.StreamReader()
    secret = SecretFile(tmp_path / "none", given=False)
    standing = asyncio.create_task(standing_by._elsewhere(("127.0.0.1", 1), secret, {}, Pipe(near), reader))
    try:
        fars[0].send(Snapshot(json.dumps(dump(Switchboard(4, "a job", 0.0, "h"))).encode(), True, 1))
        while made._known is None:
            await asyncio.sleep(0.01)
        end = await turns_to(made, Hello(1, "worker", 71, "h", line=1, silent=silent))
        while not list(made._turned):
            await asyncio.sleep(0.01)
        if not hangs:
            fars[0].close()
        assert await asyncio.wait_for(standing, PATIENCE_S) == "leads" and led == [gone_s]
        end.close()
    finally:
        await made.entrance.close()
        near.close()
        far.close()


async def test_a_hello_that_comes_late_is_passed_on_like_those_before():
    """Its worker turns to the standby once that already coordinates."""
    answers: asyncio.Queue[Hello] = asyncio.Queue()
    early, late = (Hello(rank, "worker", 70 + rank, "h", line=rank) for rank in (1, 2))
    async with candidate() as made:
        ends = [await turns_to(made, early)]
        while not list(made._turned):
            await asyncio.sleep(0.01)
        made.hand_over(lambda control, hello: answers.put_nowait(hello))
        ends += [await turns_to(made, Placed(1)), await turns_to(made, late)]
        assert [await asyncio.wait_for(answers.get(), PATIENCE_S) for _ in range(2)] == [early, late]
        assert await asyncio.to_thread(ends[1].receive, PATIENCE_S) is None and ends[1].broken is not None
        for end in ends:
            end.close()


@pytest.mark.parametrize("dead", (True, False))
async def test_whose_connection_ends_goes_on_if_the_coordinator_is_dead_and_else_makes_room_for_the_next(
    dead, monkeypatch
):
    """Its guard keeps one only: with one that never hears of the coordinator again, nobody would stand by."""

    async def follow(way: object, learnt: list[Known]) -> None:
        learnt.append(Known(Switchboard(4, "a job", 0.0, "h"), 1))

    async def go_on(*said: object) -> object:
        return said[-1]

    monkeypatch.setattr(standing_by, "_follow", follow)
    monkeypatch.setattr(standing_by, "call_this", lambda name: None)
    monkeypatch.setattr(standing_by.Hosted, "go_on", go_on)
    monkeypatch.setattr(standing_by, "ALONE_S", PATIENCE_S if dead else 0.05)
    (near, far), reader, secret = socket.socketpair(), asyncio.StreamReader(), SecretFile(Path("none"), given=False)
    standing = asyncio.create_task(standing_by._here(("127.0.0.1", 1), secret, {}, Pipe(near), reader))
    await asyncio.sleep(0)
    if dead:
        reader.feed_data(b'{"lead": "it was killed"}\n')
    assert await asyncio.wait_for(standing, PATIENCE_S) == ("it was killed" if dead else None)
    near.close()
    far.close()
