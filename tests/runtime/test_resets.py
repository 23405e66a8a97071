"""A connection that a kernel resets: its worker may live as long as somebody would report its end."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

import pytest

from recycle_plugin.core.coordinator import exchange, switchboard
from recycle_plugin.core.messages.from_coordinator import Welcome
from recycle_plugin.core.messages.from_workers import (
    Exited,
)
from recycle_plugin.core.vocabulary.deadlines import LATE_S, TICK_S
from recycle_plugin.runtime.control.connections import SocketControl
from recycle_plugin.runtime.control.coordinator import Coordinator
from tests.support.coordinator_players import PATIENCE_S, Player
from tests.support.secret import SECRET
from tests.support.standing_by import one_worker


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
