"""A process that stands by knows all that anybody in the job has heard of the coordinator, and goes on from there."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from recycle_plugin.core.coordinator import exchange, mirror, switchboard
from recycle_plugin.core.coordinator.state_dump import dump
from recycle_plugin.core.coordinator.succession import Succession
from recycle_plugin.core.coordinator.switchboard import Switchboard
from recycle_plugin.core.messages.from_coordinator import Committed, Generation, Refused, Resume, Welcome
from recycle_plugin.core.messages.from_workers import (
    Exited,
    Fingerprint,
    Heartbeat,
    Hello,
    Note,
    Stepped,
    SurvivorReport,
)
from recycle_plugin.core.messages.mirroring import Got, Knows, Snapshot, StandsBy, Taken, Turns
from recycle_plugin.core.vocabulary.deadlines import LATE_S, TICK_S
from recycle_plugin.runtime.control import coordinator as server
from recycle_plugin.runtime.control import framed
from recycle_plugin.runtime.control.connections import SocketControl, connect
from recycle_plugin.runtime.control.coordinator import Coordinator
from recycle_plugin.runtime.control.entrance import Entrance
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.control.mirror import follow
from recycle_plugin.runtime.system import clock
from tests.support.coordinator_players import PATIENCE_S, Player, four_workers
from tests.support.membership import computes
from tests.support.secret import SECRET, way

STANDBY = Hello(-1, mirror.STANDBY, 77, "h")


def state(board: Switchboard) -> str:
    return json.dumps(dump(board))


@asynccontextmanager
async def standing_by(coordinator: Coordinator):
    """(the process that is in step, each time that it changes; what the one that stands by comes to know)."""
    changes: list[int] = []
    coordinator.mirror.watch(changes.append)
    control = InLoop(coordinator.connect())
    learnt: list[mirror.Known] = []
    following = asyncio.create_task(follow(control, STANDBY, learnt.append))

    async def known() -> mirror.Known:
        await following
        return learnt[-1]

    task = asyncio.create_task(known())
    while not changes:
        await asyncio.sleep(0)
    try:
        yield changes, task
    finally:
        task.cancel()
        control.close()


@asynccontextmanager
async def one_worker():
    """(a coordinator of one worker, a connection of that which it has welcomed, what that has said)."""
    coordinator = Coordinator(1, lambda event, now: None, SECRET)
    await coordinator.start("127.0.0.1", 0)
    hello = Hello(0, "worker", 12, "h")
    control = await asyncio.to_thread(connect, way(coordinator.address), PATIENCE_S)
    try:
        control.send(hello)
        assert isinstance(await asyncio.to_thread(control.receive, PATIENCE_S), Welcome)
        yield coordinator, control, hello
    finally:
        control.close()
        await coordinator.close()


async def step(workers: list[Player], number: int, ranks: range = range(4)) -> None:
    for rank in ranks:
        workers[rank].send(Heartbeat(rank, number, number, computes("1F0.0@1")))
        workers[rank].send(Fingerprint(rank, number, "same"))
        workers[rank].send(Stepped(rank, 0, number))
    for rank in ranks:
        assert await workers[rank].hear(Committed, Generation) == Committed(number)


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


async def test_who_hangs_up_since_it_hears_nothing_is_not_dead():
    """It comes again, and nothing is lost; whoever closes without a word is."""
    async with one_worker() as (coordinator, control, hello):
        coordinator._begin_term("127.0.0.9:9")
        while (await asyncio.to_thread(control.receive, 0.1), control._term.term) != (None, 1):
            pass
        line = control.line
        control.give_up("nothing is heard")
        while line in coordinator._heard:
            await asyncio.sleep(0.01)
        assert line in coordinator._board.lines
        assert (await asyncio.to_thread(control.resume, hello, PATIENCE_S)).line == line
        control.close()
        while line in coordinator._board.lines:
            await asyncio.sleep(0.01)


async def resets(coordinator: Coordinator, control: SocketControl) -> None:
    """The worker's kernel gives its connection up."""
    control._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    control._socket.close()
    while control.line in coordinator._heard:
        await asyncio.sleep(0.01)


async def supervises(coordinator: Coordinator) -> Player:
    supervisor = Player(coordinator, 0, "supervisor", 50)
    await supervisor.hear(Welcome)
    return supervisor


async def test_whose_connection_is_reset_may_come_again_as_long_as_somebody_would_report_its_end():
    async with one_worker() as (coordinator, control, hello):
        supervisor, line = await supervises(coordinator), control.line
        for _ in range(2):
            await resets(coordinator, control)
            coordinator._see_whether_watched(line)
            assert line in coordinator._board.lines
            assert (await asyncio.to_thread(control.resume, hello, PATIENCE_S)).line == line
        supervisor.close()


@pytest.mark.parametrize("first", ("reset", "exited"))
async def test_whose_connection_was_reset_by_its_death_is_lost_at_once(first, monkeypatch):
    """A kernel resets the connection of a process that dies with unread data."""
    monkeypatch.setattr(switchboard, "LAST_WORDS_S", 600.0)
    async with one_worker() as (coordinator, control, _):
        supervisor = await supervises(coordinator)
        if first == "reset":
            await resets(coordinator, control)
        supervisor.send(Exited(0, -9, 0.0))
        if first == "exited":
            while not coordinator._board._exits:
                await asyncio.sleep(0.01)
            await resets(coordinator, control)
        while not coordinator.membership.lost:
            await asyncio.sleep(0.01)
        supervisor.close()


@pytest.mark.parametrize("supervised", ("never", "no more"))
async def test_whose_connection_is_reset_is_dead_if_nobody_would_report_its_end(supervised, monkeypatch):
    """Its host may be gone; a supervisor that was killed has a moment to come again."""
    monkeypatch.setattr(exchange, "WATCHED_S", 0.05)
    async with one_worker() as (coordinator, control, _):
        supervisor = await supervises(coordinator) if supervised == "no more" else None
        await resets(coordinator, control)
        if supervisor is not None:
            coordinator._see_whether_watched(control.line)
            assert control.line in coordinator._board.lines
            supervisor.close()
        while control.line in coordinator._board.lines:
            await asyncio.sleep(0.01)
        assert not coordinator._reset


async def test_a_coordinator_that_was_stopped_takes_nobody_for_a_stranger_who_has_gone_meanwhile():
    said: list = []
    coordinator = Coordinator(1, lambda event, now: said.append(event), SECRET)
    await coordinator.start("127.0.0.1", 0)
    try:
        coordinator._door.refuses(("127.0.0.2", 1), ConnectionResetError(104, "it was reset"))
        assert [event.kind for event in said] == ["stranger"]
        time.sleep(LATE_S + TICK_S)  # nothing runs in this process
        while not coordinator._door._late_until:
            await asyncio.sleep(0.01)
        coordinator._door.refuses(("127.0.0.3", 1), ConnectionResetError(104, "it was reset"))
        assert len(said) == 1
        coordinator._door.refuses(("127.0.0.3", 1), "its seal is another one's")
        assert len(said) == 2
    finally:
        await coordinator.close()
