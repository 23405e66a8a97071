"""A standby on another host: who may take the coordinator's place, and how many have to know so."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from recycle_plugin.core.coordinator import mirror
from recycle_plugin.core.coordinator.succession import Succession
from recycle_plugin.core.messages.from_coordinator import Committed, Refused, Welcome
from recycle_plugin.core.messages.from_workers import (
    Hello,
    Note,
    Stepped,
)
from recycle_plugin.core.messages.mirroring import Got, Knows, Snapshot, StandsBy
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.runtime.control import coordinator as server
from recycle_plugin.runtime.control.connections import connect
from recycle_plugin.runtime.control.coordinator import Coordinator
from recycle_plugin.runtime.control.entrance import Entrance
from recycle_plugin.runtime.control.in_loop import InLoop
from tests.support.coordinator_players import PATIENCE_S, four_workers
from tests.support.secret import SECRET, way
from tests.support.standing_by import STANDBY, standing_by, step

ELSEWHERE = replace(STANDBY, port=7)


@asynccontextmanager
async def one_elsewhere(said: list, monkeypatch):
    """(coordinator, workers, the connection of one that stands by on another host, in step) of a job on three hosts."""
    async with four_workers(said) as (coordinator, workers):
        monkeypatch.setattr(Succession, "wants_one", lambda self, roster: True)
        control = InLoop(await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S))
        control.send(ELSEWHERE)
        snapshot = await control.receive(PATIENCE_S)
        assert isinstance(snapshot, Snapshot)
        while not coordinator._board.succession.address:
            control.send(Got(coordinator.mirror._sent))
            await asyncio.sleep(0.01)
        assert coordinator._board.succession.address == ("127.0.0.1", 7)
        taken = asyncio.create_task(takes_all(control, coordinator))
        try:
            for worker in workers:
                worker.send(Knows(1))
            yield coordinator, workers, control, taken
        finally:
            taken.cancel()
            control.close()


async def takes_all(control: InLoop, coordinator: Coordinator) -> None:
    while control.broken is None:
        if await control.receive(PATIENCE_S) is not None:
            control.send(Got(coordinator.mirror._sent))


async def settled(coordinator: Coordinator, term: int) -> None:
    while coordinator._board.succession.term < term:
        await asyncio.sleep(0.01)


async def test_the_coordinator_goes_on_without_who_stands_by_elsewhere_once_half_know(monkeypatch):
    """Which the workers' ends say by themselves."""
    said: list = []
    async with one_elsewhere(said, monkeypatch) as (coordinator, workers, control, _):
        await step(workers, 1)
        for worker in workers:  # these answer nothing by themselves
            monkeypatch.setattr(worker.control, "_learn", lambda term: None)
        control.close()
        await settled(coordinator, 2)
        for rank in range(4):
            workers[rank].send(Stepped(rank, 0, 2))
        while coordinator.membership.committed < 2:
            await asyncio.sleep(0.01)
        workers[0].send(Knows(2))
        assert await workers[0].receive(0.2) is None, "one of four is not half"
        workers[1].send(Knows(2))
        for worker in workers:
            assert await worker.hear(Committed) == Committed(2)
        assert not coordinator.deposed.is_set()


async def test_a_coordinator_of_which_not_half_know_the_term_ends_and_says_nothing_more(monkeypatch):
    monkeypatch.setattr(mirror, "AGREE_S", 0.3)
    said: list = []
    async with one_elsewhere(said, monkeypatch) as (coordinator, workers, control, _):
        await step(workers, 1)
        for worker in workers[1:]:
            monkeypatch.setattr(worker.control, "_learn", lambda term: None)
        control.close()
        await settled(coordinator, 2)
        for rank in range(4):
            workers[rank].send(Stepped(rank, 0, 2))
        await asyncio.wait_for(coordinator.deposed.wait(), PATIENCE_S)
        assert coordinator.membership.committed == 2
        assert [await worker.receive(0.0) for worker in workers] == [None] * 4
        assert [event for event in said if event.kind == "deposed"] and not said_of(said, "committed", 2)


def said_of(said: list, kind: str, step: int) -> list:
    return [event for event in said if event.kind == kind and event.details.get("step") == step]


async def test_enough_may_know_while_nothing_else_is_said(monkeypatch):
    said: list = []
    async with one_elsewhere(said, monkeypatch) as (coordinator, workers, control, _):
        control.close()
        await settled(coordinator, 2)
        for worker in workers:
            await worker.receive(0.2)  # it answers by itself
        while len(coordinator._board.knowing(2)) < 4:
            await asyncio.sleep(0.01)
        coordinator.mirror._agreed_until = 0.0  # as if all had taken longer
        coordinator.mirror.see_late()
        assert not coordinator.deposed.is_set()


async def test_time_goes_on_where_another_hosts_clock_shows_another_one(monkeypatch):
    """Else deadlines that are in the state would be over at once, or never."""
    said: list = []
    async with four_workers(said) as (coordinator, workers), standing_by(coordinator) as (_, task):
        await step(workers, 1)
        coordinator.mirror._followers[0].control.close()
        known = await asyncio.wait_for(task, PATIENCE_S)
    last = known.now
    monkeypatch.setattr(server.clock, "now", lambda: 5.0)
    following = Coordinator(0, lambda event, now: said.append((event, now)), SECRET, known=known)
    entrance = Entrance("127.0.0.1", 0, following._door, lambda control: None, following._warn)
    entrance.open()
    await following.lead(entrance, "", 0.0)
    try:
        following.fail("the test is over")
        assert following._now() == last
        assert {now for _, now in said[-1:]} == {5.0}, "people are told this host's time"
    finally:
        await following.close()


async def test_nobody_is_given_up_while_nothing_gets_out(monkeypatch):
    """Who stands by takes nothing, as where this host is cut off; time goes on once it does."""
    said: list = []
    async with one_elsewhere(said, monkeypatch) as (coordinator, workers, control, taken):
        taken.cancel()
        workers[0].send(Stepped(0, 0, 1))
        workers[0].send(Note(0, "a note", "that is held", {}))
        while not coordinator.mirror.holds_up:
            await asyncio.sleep(0.01)
        ticks: list[float] = []
        tick = coordinator._board.tick
        monkeypatch.setattr(coordinator._board, "tick", lambda now, effects: (ticks.append(now), tick(now, effects)))
        await asyncio.sleep(3 * TICK_S)
        assert not ticks
        control.send(Got(coordinator.mirror._sent))
        while not ticks:
            await asyncio.sleep(0.01)


async def test_where_one_stands_by_elsewhere_no_other_does(monkeypatch):
    """Also one that was there before, and comes again, while another host was asked."""
    said: list = []
    async with one_elsewhere(said, monkeypatch) as (coordinator, _, control, _):
        again = InLoop(await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S))
        again.send(replace(ELSEWHERE, port=8))
        assert isinstance(await again.receive(PATIENCE_S), Refused)
        assert coordinator._board.succession.address == ("127.0.0.1", 7) and control.broken is None
        again.close()


async def test_nobody_stands_by_elsewhere_before_half_know_that_the_one_before_is_out(monkeypatch):
    """Else they could hear of the one before alone, which knows nothing of what has come since."""
    said: list = []
    async with one_elsewhere(said, monkeypatch) as (coordinator, workers, control, _):
        for worker in workers:
            monkeypatch.setattr(worker.control, "_learn", lambda term: None)
        control.close()
        await settled(coordinator, 2)
        again = InLoop(await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S))
        again.send(ELSEWHERE)
        assert await again.receive(PATIENCE_S) is None and again.broken is not None, "it may ask again"
        assert coordinator._board.succession.term == 2
        for worker in workers:
            worker.send(Knows(2))
        while not coordinator.mirror._is_agreed():
            await asyncio.sleep(0.01)
        again = InLoop(await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S))
        again.send(ELSEWHERE)
        assert isinstance(await again.receive(PATIENCE_S), Snapshot)
        again.close()


async def test_one_elsewhere_that_never_comes_to_be_in_step_is_let_go_and_blocks_nobody(monkeypatch):
    monkeypatch.setattr(mirror, "STEP_S", 0.1)
    monkeypatch.setattr(Succession, "wants_one", lambda self, roster: True)
    said: list = []
    async with four_workers(said) as (coordinator, _):
        stuck = InLoop(await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S))
        stuck.send(ELSEWHERE)
        while await stuck.receive(PATIENCE_S) is not None:
            pass  # it hears all, and answers nothing
        assert stuck.broken is not None and not coordinator.mirror.elsewhere
        again = InLoop(await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S))
        again.send(replace(ELSEWHERE, port=8))
        assert isinstance(await again.receive(PATIENCE_S), Snapshot)
        for control in (stuck, again):
            control.close()


async def test_who_stands_by_comes_to_be_in_step_where_there_are_always_more_news():
    said: list = []
    async with four_workers(said) as (coordinator, _):
        control = InLoop(coordinator.connect())
        follower = coordinator.mirror.admit(control, STANDBY, "")
        changes: list[int] = []
        coordinator.mirror.watch(changes.append)
        for _ in range(3):
            coordinator._take("tick")
            coordinator.mirror.heard(follower, Got(coordinator.mirror._sent - 1))
        assert follower.in_step and changes == [77]
        control.close()


async def test_whom_nobody_wants_elsewhere_is_let_go(monkeypatch):
    """Of two hosts neither may go on against the other, so the coordinator goes on alone, once half know."""
    said: list = []
    async with one_elsewhere(said, monkeypatch) as (coordinator, workers, _, _):
        monkeypatch.setattr(Succession, "wants_one", lambda self, roster: False)
        await settled(coordinator, 2)
        assert coordinator._board.succession.address is None
        await step(workers, 1)
        again = InLoop(await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S))
        again.send(ELSEWHERE)
        assert isinstance(await again.receive(PATIENCE_S), Refused)


@pytest.mark.parametrize("terms", (["10.0.0.2:7"], ["10.0.0.2:7", ""]), ids=("at once", "while the first waits for it"))
async def test_who_takes_its_place_on_its_host_goes_on_once_half_know_that_the_other_one_is_out(terms):
    """Though they come to it: what they are told first is the term, and nothing else before enough have."""
    said: list = []
    async with four_workers(said) as (coordinator, workers), standing_by(coordinator) as (_, task):
        await step(workers, 1)
        for term in terms:
            coordinator._begin_term(term)
        await step(workers, 2)
        coordinator.mirror._followers[0].control.close()
        known = await asyncio.wait_for(task, PATIENCE_S)
        lines = [(worker.control.line, worker.control._token) for worker in workers]
    last = len(terms) + 1
    assert known.board.succession.term == last - 1
    following = Coordinator(0, lambda event, now: said.append(event), SECRET, known=known)
    await following.start("127.0.0.1", 0)
    try:
        assert known.board.succession.address is None and known.board.succession.term == last
        back = []
        for rank, (line, token) in enumerate(lines):
            control = await asyncio.to_thread(connect, way(following.address), PATIENCE_S)
            control.send(Hello(rank, "worker", 1000 + rank, "h", line=line, token=token, term=1))
            term = await asyncio.to_thread(control.receive, PATIENCE_S)
            assert isinstance(term, StandsBy) and (term.term, term.host) == (last, "")
            back.append(control)
        assert await asyncio.to_thread(back[0].receive, 0.2) is None
        for control in back[:2]:
            control.send(Knows(last))
        for control in back:
            assert isinstance(await asyncio.to_thread(control.receive, PATIENCE_S), Welcome)
            control.close()
    finally:
        await following.close()
