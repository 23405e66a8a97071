"""A process that stands by knows all that anybody in the job has heard of the coordinator, and goes on from there."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from recycle_plugin.core.coordinator import exchange, mirror
from recycle_plugin.core.coordinator.state_dump import dump
from recycle_plugin.core.coordinator.switchboard import Switchboard
from recycle_plugin.core.messages.from_coordinator import Committed, Generation, Refused, Resume, Welcome
from recycle_plugin.core.messages.from_workers import (
    Exited,
    Note,
    Stepped,
    SurvivorReport,
)
from recycle_plugin.core.messages.mirroring import Got, Snapshot, Taken, Turns
from recycle_plugin.core.vocabulary.deadlines import LATE_S, TICK_S
from recycle_plugin.runtime.control import coordinator as server
from recycle_plugin.runtime.control import framed
from recycle_plugin.runtime.control.connections import connect
from recycle_plugin.runtime.control.coordinator import Coordinator
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.system import clock
from tests.support.coordinator_players import PATIENCE_S, Player, four_workers
from tests.support.secret import SECRET, way
from tests.support.standing_by import STANDBY, one_worker, standing_by, step


def state(board: Switchboard) -> str:
    return json.dumps(dump(board))


async def lose(workers: list[Player], supervisor: Player, rank: int, committed: int) -> None:
    supervisor.send(Exited(rank, -9, 0.0))
    workers[rank].close()
    for each, worker in enumerate(workers):
        if each != rank:
            generation = await worker.hear(Generation)
            worker.send(SurvivorReport(each, generation.number, committed, "plan", {}))
    for each, worker in enumerate(workers):
        if each != rank:
            await worker.hear(Resume)


@pytest.mark.parametrize("late", (False, True), ids=("from the start", "in mid-job"))
async def test_who_stands_by_comes_to_the_same_state(late):
    """Also from a state that was written down, as it is for one that comes later."""
    said: list = []
    async with four_workers(said) as (coordinator, workers):
        supervisor = Player(coordinator, 3, "supervisor", 50)
        await supervisor.hear(Welcome)
        if late:
            await step(workers, 1)
        async with standing_by(coordinator) as (changes, task):
            if not late:
                await step(workers, 1)
            await step(workers, 2)
            workers[0].send(Note(0, "a note", "of the script", {}))
            await lose(workers, supervisor, 3, 2)
            await step(workers, 3, range(3))
            assert changes == [77]
            known = state(coordinator._board)
            coordinator.mirror._followers[0].control.close()  # as its end does, with all that it has said
            assert state((await asyncio.wait_for(task, PATIENCE_S)).board) == known
            while changes != [77, 0]:
                await asyncio.sleep(0)


async def test_nothing_goes_out_before_who_stands_by_has_what_it_follows_from():
    said: list = []
    async with four_workers(said) as (coordinator, workers):
        other = InLoop(coordinator.connect())
        other.send(STANDBY)
        assert isinstance(await other.receive(PATIENCE_S), Snapshot)
        other.send(Got(coordinator.mirror._sent))
        changes: list[int] = []
        coordinator.mirror.watch(changes.append)
        while not changes:
            await asyncio.sleep(0)
        for rank in range(4):
            workers[rank].send(Stepped(rank, 0, 1))
        taken = 0
        while taken < 4:  # ticks may come between
            news = await other.receive(PATIENCE_S)
            assert isinstance(news, Taken)
            taken += news.kind == "said"
        assert coordinator.membership.committed == 1 and await workers[0].receive(0.2) is None
        other.send(Got(coordinator.mirror._sent))
        assert await workers[0].hear(Committed) == Committed(1)
        other.close()


async def test_who_takes_nothing_is_let_go_and_whoever_decides_hears_so_first(monkeypatch):
    monkeypatch.setattr(mirror, "LATE_S", 0.05)
    said: list = []
    order: list[Any] = []
    async with four_workers(said) as (coordinator, workers):
        other = InLoop(coordinator.connect())
        other.send(STANDBY)
        assert isinstance(await other.receive(PATIENCE_S), Snapshot)
        other.send(Got(coordinator.mirror._sent))
        coordinator.mirror.watch(order.append)
        while not order:
            await asyncio.sleep(0)
        release = coordinator.mirror._release
        monkeypatch.setattr(
            coordinator.mirror, "_release", lambda effects: (effects.some and order.append(effects), release(effects))
        )
        await step(workers, 1)
        assert order[:2] == [77, 0] and any(effects.frames for effects in order[2:])
        other.close()


async def test_a_state_longer_than_may_wait_for_others_comes_to_who_stands_by(monkeypatch):
    """What scripts have told each other at their beginning, say, which is kept for newcomers."""
    monkeypatch.setattr(framed, "UNSENT", 1 << 20)
    async with one_worker() as (coordinator, _, _):
        coordinator._board.run_dir = "x" * (32 << 20)
        control = InLoop(await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S))
        control.send(STANDBY)
        last = False
        while not last:
            piece = await control.receive(PATIENCE_S)
            assert isinstance(piece, Snapshot), control.broken
            last = piece.last
        control.close()


async def test_a_connection_that_is_made_again_at_the_same_coordinator_goes_on():
    """Where that has not noticed its end, nothing is lost; and where it has, the others go on without that worker."""
    async with one_worker() as (coordinator, control, hello):
        stranger, again = [await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S) for _ in range(2)]
        stranger.send(replace(hello, line=control.line, token="0" * len(control._token)))
        assert isinstance(await asyncio.to_thread(stranger.receive, PATIENCE_S), Refused)
        again.send(replace(hello, line=control.line, token=control._token))
        welcome = await asyncio.to_thread(again.receive, PATIENCE_S)
        assert isinstance(welcome, Welcome) and welcome.line == control.line in coordinator._board.lines
        stranger.close()
        again.close()
        while control.line in coordinator._board.lines:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(control.resume, hello, PATIENCE_S) is None


async def test_who_stays_away_once_more_may_stay_as_long_as_before(monkeypatch):
    later: list = []
    async with one_worker() as (coordinator, control, hello):
        monkeypatch.setattr(coordinator, "_later", lambda after_s, happen, line: later.append((happen, line)))
        for times in (1, 2):
            control.send(Turns(0))
            control.close()
            while len(later) < times:
                await asyncio.sleep(0.01)
            if times == 1:
                assert await asyncio.to_thread(control.resume, hello, PATIENCE_S)
        (first, line), (second, _) = later
        first(line)
        assert line in coordinator._board.lines
        second(line)
        assert line not in coordinator._board.lines


async def test_whose_connection_does_not_come_back_is_as_good_as_dead(monkeypatch):
    """To the one that goes on with what another has known."""
    for module in (exchange, server):
        monkeypatch.setattr(module, "BACK_S", 0.1)
    said: list = []
    async with four_workers(said) as (coordinator, workers), standing_by(coordinator) as (_, task):
        await step(workers, 1)
        coordinator.mirror._followers[0].control.close()
        known = await asyncio.wait_for(task, PATIENCE_S)
    following = Coordinator(0, lambda event, now: said.append(event), SECRET, known=known)
    await following.start("127.0.0.1", 0)
    try:
        following._refuse_datagram(("127.0.0.1", 1), "its seal is another one's")
        assert not [event for event in said if event.kind == "stranger"], "it is sealed for the one that has died"
        while not [event for event in said if event.kind == "end"]:
            await asyncio.sleep(0.01)
        following._refuse_datagram(("127.0.0.1", 1), "its seal is another one's")
        assert len([event for event in said if event.kind == "stranger"]) == 1
        assert not known.board.lines and following.membership.lost
    finally:
        await following.close()


async def test_the_jobs_time_goes_on_as_before_where_another_process_coordinates_or_this_one_was_stopped(monkeypatch):
    """Deadlines would pass, and healthy newcomers be taken for gone with their hosts, before anybody is heard."""
    moment = 1000.0
    monkeypatch.setattr(clock, "now", lambda: moment)
    known = mirror.Known(Switchboard(1, "a job", 5000.0, "h"), 1, now=5000.0)  # by a clock that was set since
    coordinator = Coordinator(0, lambda event, now: None, SECRET, known=known)
    assert coordinator._now() == 5000.0
    moment += TICK_S
    seconds = coordinator._seconds()
    assert coordinator._now() == 5000.0 + TICK_S
    moment += 1000.0
    assert coordinator._now() == 5000.0 + TICK_S + LATE_S and coordinator._seconds() == seconds + LATE_S


# --- on another host -----------------------------------------------------------------------------------
