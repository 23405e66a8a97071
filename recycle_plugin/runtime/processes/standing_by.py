"""The standbys, which may take the coordinator's place: one on its own host, for which their guard decides, and one on
another host, to which the others turn if the coordinator is silent (core/coordinator/succession.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from recycle_plugin.authentication.door import Door
from recycle_plugin.authentication.handshake import Port
from recycle_plugin.authentication.secret import NoSecret, SecretFile
from recycle_plugin.core.coordinator.mirror import STANDBY, TURNED_S, Known, Turned
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.runtime.control.connections import ControlWay
from recycle_plugin.runtime.control.coordinator import HELLO_S
from recycle_plugin.runtime.control.entrance import Entrance
from recycle_plugin.runtime.control.framed import Control
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.control.mirror import follow
from recycle_plugin.runtime.processes import signal_senders as senders
from recycle_plugin.runtime.processes.guard import HOST, Pipe, call_this
from recycle_plugin.runtime.processes.hosted import (
    Hosted,
    address_of,
    first_of,
    in_one_line,
    pause,
    tell_folder,
    until_through,
)
from recycle_plugin.runtime.system.console import say
from recycle_plugin.runtime.system.host import host_name

CONNECT_S = 60.0  # how long a standby tries to reach the coordinator
LOOK_S = 0.5  # s between tries
ALONE_S = 30.0  # how long the guard may take to say that the coordinator at the end of a broken connection is dead
Address = tuple[str, int]


def stand_by(environment: dict[str, str], line: socket.socket, address: Address | None, elsewhere: bool) -> int:
    """Stand by at the end of the guard's ``line`` for the coordinator at ``address`` (None: the launcher's), which is
    ``elsewhere`` or on this host. Return the job's exit code if this process takes its place, else 0.
    """
    own = environment if address is None else environment | {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}

    async def run() -> int:
        senders.spare_threads()
        reader, _ = await asyncio.open_connection(sock=line)
        standing = _elsewhere if elsewhere else _here
        hosted = await standing(address_of(own), SecretFile.of(environment), environment, Pipe(line), reader)
        return 0 if hosted is None else await until_through(hosted, Pipe(line), reader)

    return in_one_line(run)


async def _here(
    address: Address, secret: SecretFile, environment: dict[str, str], guard: Pipe, reader: asyncio.StreamReader
) -> Hosted | None:
    """Return the new host once the guard says so. None if no state is known to go on from, or if the connection has
    ended and the guard says nothing: this process then ends, and the guard starts another one.
    """
    learnt: list[Known] = []
    following = asyncio.create_task(_follow(ControlWay(address, secret), learnt))
    hearing = asyncio.create_task(reader.readline())
    await asyncio.wait((following, hearing), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait((hearing,), timeout=ALONE_S if following.done() else None)
    said = json.loads(hearing.result() or "{}") if hearing.done() else {}
    if "lead" not in said:
        return None
    await following
    if not learnt:
        return None
    call_this(HOST)
    told = partial(tell_folder, guard)
    return await Hosted.go_on(address, learnt[-1], secret, told, os.getppid(), said["lead"])


async def _follow(way: ControlWay, learnt: list[Known]) -> None:
    """Take in what the coordinator at the end of ``way`` does, until it is gone."""
    try:
        control = await InLoop.connect(way, CONNECT_S)
    except (ConnectionError, NoSecret):  # no coordinator answers, or it can't be authenticated
        return
    try:
        await follow(control, Hello(-1, STANDBY, os.getpid(), host_name()), learnt.append)
    finally:
        control.close()


async def _elsewhere(
    address: Address, secret: SecretFile, environment: dict[str, str], guard: Pipe, reader: asyncio.StreamReader
) -> Hosted | None:
    """Return the new host once more than half of the workers have turned here; None if it is no longer wanted."""
    way = ControlWay(address, secret)
    candidate = await Candidate.at(way)
    if candidate is None:
        return None
    elected, alone = asyncio.create_task(candidate.elected()), asyncio.create_task(reader.read(1))
    await asyncio.wait((elected, alone), return_when=asyncio.FIRST_COMPLETED)
    if alone.done() or (known := elected.result()) is None:  # without its guard, nothing would end the coordinator
        candidate.send_all_back()
        return None
    alone.cancel()
    await asyncio.wait((alone,))
    call_this(HOST)
    entrance, told = candidate.entrance, partial(tell_folder, guard)
    hosted = await Hosted.lead(entrance, known, secret, told, os.getppid(), candidate.gone_s, candidate.hand_over)
    guard.tell(leads=entrance.address)
    return hosted


class Candidate:
    """Follows the coordinator at the end of ``way``, first over ``control``, and counts the workers that turn here."""

    def __init__(self, way: ControlWay, control: InLoop, here: str) -> None:
        self._way, self._control = way, control
        self.entrance = Entrance(
            here, 0, Door(way.known.read(), Port.CONTROL, "at the stand-by", _say), self._come, _warn
        )
        self._turned: Turned[InLoop] = Turned()
        self.gone_s = 0.0  # for ends on the old coordinator's host to come here, too, once this is elected
        self._answer: Callable[[InLoop, Hello], None] | None = None
        self._known: Known | None = None
        self._enough: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._coming: set[asyncio.Task[Any]] = set()

    @classmethod
    async def at(cls, way: ControlWay) -> Candidate | None:
        """Return a candidate that listens at this host's address on the interface that reaches the coordinator; None if
        no coordinator answers at the end of ``way``.
        """
        try:
            control = await InLoop.connect(way, CONNECT_S)
        except (ConnectionError, NoSecret):
            return None
        made = cls(way, control, control.here)
        made.entrance.open()
        return made

    async def elected(self) -> Known | None:
        """Return the known state once enough workers have turned here; None once unwanted, or without a coordinator."""
        hello = Hello(-1, STANDBY, os.getpid(), host_name(), port=self.entrance.address[1])
        while True:
            wanted = await first_of(follow(self._control, hello, self._learn), self._enough)
            self._control.close()
            self._count()
            if self._enough.done():
                return self._known
            if not wanted or self._known is None or self._known.board.over is not None:
                return None
            again = await first_of(self._again(), self._enough)
            if self._enough.done():
                return self._known
            if not again:
                return None

    async def _again(self) -> bool:
        """Connect again, perhaps to another process that is the coordinator by now. Return whether one is there."""
        await pause(LOOK_S)
        try:
            self._control = await InLoop.connect(self._way, CONNECT_S)
        except (ConnectionError, NoSecret):
            return False
        return True

    def _learn(self, known: Known) -> None:
        self._known = known
        if known.board.job is not None:  # workers may turn here as long as they wait for the coordinator
            self._control.bear_silence(known.board.job.deadlines.cut_off_s)

    def _come(self, control: Control) -> None:
        task = asyncio.create_task(self._hear(InLoop(control)))
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    async def _hear(self, control: InLoop) -> None:
        hello = await control.receive(HELLO_S)
        if not isinstance(hello, Hello):
            control.close()
            return
        if self._answer is not None:
            self._answer(control, hello)
            return
        self._turned.add(control, hello, self._known)
        self._count()
        asyncio.get_running_loop().call_later(TURNED_S, self._look_at, control)

    def _look_at(self, control: InLoop) -> None:
        if not self._enough.done() and self._turned.send_back(control, self._known):
            asyncio.get_running_loop().call_later(TURNED_S, self._look_at, control)

    def send_all_back(self) -> None:
        """Send back all that have turned here: this process never leads."""
        self._turned.send_all_back()

    def hand_over(self, answer: Callable[[InLoop, Hello], None]) -> None:
        """Pass all connections that have turned here, and later ones, to ``answer``."""
        self._answer = answer
        for control, hello in self._turned:
            answer(control, hello)

    def _count(self) -> None:
        if not self._enough.done() and self._turned.elect(self.entrance.address[1], self._known):
            self._enough.set_result(None)
            self.gone_s = self._turned.gone_s(hangs=self._control.broken is None)
            self._control.close()  # what is confirmed from now on, the coordinator would go on with


def _warn(text: str) -> None:
    say(f"warning: at the coordinator's stand-by {text}")


def _say(text: str, address: str) -> None:
    say(f"warning: {text}")
