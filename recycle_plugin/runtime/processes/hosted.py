"""What the host of rank 0 runs: the coordinator, on the launcher's own master port. Rank 0's guard hosts it
(runtime/processes/guard.py), or the launcher for one host.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from recycle_plugin.authentication.secret import NoSecret, SecretFile
from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.coordinator.mirror import Known
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.errors import NoCredentials
from recycle_plugin.runtime.control.coordinator import Coordinator
from recycle_plugin.runtime.control.entrance import Entrance
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.processes import signal_senders as senders
from recycle_plugin.runtime.processes.guard import DEPOSED, Pipe
from recycle_plugin.runtime.processes.telling import Telling
from recycle_plugin.runtime.system import clock
from recycle_plugin.runtime.system.console import say
from recycle_plugin.runtime.system.host import host_name

GOODBYE_S = 30.0  # how long rank 0 waits for the other supervisors once the job is over
FREE_S, LOOK_S = 10.0, 0.02  # how long a dead coordinator's port may be taken; s between tries
KEEP_S = 3600.0  # s between refreshes of the secret's file
ANOTHER_PORT = "start the launcher with --master_port and a free one"
OF_TORCHRUN = "it follows from torchrun's own port: start torchrun again, with another --master_port if it has one"
ANOTHER_ADDRESS = (
    "start the launcher with --master_addr (srun: with MASTER_ADDR set) and an address that is that host's for all "
    "others"
)
ANYWHERE = "0.0.0.0"
T = TypeVar("T")


async def pause(seconds: float) -> bool:
    """Let ``seconds`` pass; return True."""
    await asyncio.sleep(seconds)
    return True


async def first_of(wanted: Awaitable[T], *ends: asyncio.Future[Any], timeout_s: float | None = None) -> T | None:
    """Return the result of ``wanted``; None if one of ``ends`` is done by then or ``timeout_s`` has passed."""
    waiting = asyncio.ensure_future(wanted)
    try:
        await asyncio.wait({waiting, *ends}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() and not any(end.done() for end in ends) else None
    finally:
        waiting.cancel()


class BadMaster(RuntimeError):
    """The master's address or port can't be used; the message says what to give the launcher instead."""


class Hosted:
    """The ``coordinator``, hosted by rank 0's guard or by the launcher for one host."""

    def __init__(
        self,
        coordinator: Coordinator,
        telling: Telling,
        secret: SecretFile,
    ) -> None:
        self.coordinator, self._telling, self._secret = coordinator, telling, secret
        self._keeping = asyncio.create_task(self._keep_secret())

    @classmethod
    async def start(
        cls,
        address: tuple[str, int],
        ranks: int,
        environment: dict[str, str],
        told: Callable[[Event], None] = lambda event: None,
        guard: int | None = None,
    ) -> Hosted:
        """Start the coordinator, and create the job's secret. ``told`` gets all events that the
        user gets. ``guard``: the process that ends the job at SIGTERM, if not this one. Raises BadMaster if the port of
        ``address`` is taken, and NoCredentials.
        """
        file, here = SecretFile.of(environment | {"MASTER_PORT": str(address[1])}), _own_address(address[0])
        secret = file.make()
        telling = Telling(address, secret, guard or os.getpid(), told)
        coordinator = Coordinator(ranks, telling.say, secret, telling.claims.take)
        telling.run_dir = lambda: coordinator.run_dir
        try:
            await coordinator.start(here, address[1], file.put)
        except OSError as error:
            advice = OF_TORCHRUN if "TORCHELASTIC_RUN_ID" in environment else ANOTHER_PORT
            raise BadMaster(f"master port {address[1]} cannot be used ({error.strerror}): {advice}") from error
        if here == ANYWHERE:
            text = f"{address[0]} is no address of this host, so the coordinator listens at all of its addresses"
            telling.say(Event("warning", text), clock.now())
        return cls(coordinator, telling, file)

    @classmethod
    async def go_on(
        cls,
        address: tuple[str, int],
        known: Known,
        secret: SecretFile,
        told: Callable[[Event], None],
        guard: int,
        why: str,
    ) -> Hosted:
        """Go on at the ``address`` of a dead coordinator, with its state ``known``.
        ``why``: how the coordinator has ended, in words. Raises BadMaster if the port does not become free.
        """
        coordinator, telling = cls._following(address, known, secret, told, guard)
        await _until_free(lambda: coordinator.start(_own_address(address[0]), address[1], secret.adopt), address[1])
        return cls(coordinator, telling, secret)._taken_over(why)

    @classmethod
    async def lead(
        cls,
        entrance: Entrance,
        known: Known,
        secret: SecretFile,
        told: Callable[[Event], None],
        guard: int,
        gone_s: float,
        hand_over: Callable[[Callable[[InLoop, Hello], None]], None],
    ) -> Hosted:
        """Go on at the ``entrance`` of this host, in place of a coordinator on another host, after
        enough workers have turned here. Ends on the old host may take ``gone_s`` seconds to come. ``hand_over`` passes
        connections of those that have turned, and later ones, to a function.
        """
        address, gone = entrance.address, known.board.succession.host
        known.board.moves(host_name())
        coordinator, telling = cls._following(address, known, secret, told, guard)
        await coordinator.lead(entrance, gone, gone_s)
        hand_over(coordinator.answer)
        where = "{}:{}".format(*address)
        why = f"the coordinator on host {gone} is silent, and more than half of the workers have turned to {where}"
        return cls(coordinator, telling, secret)._taken_over(why)

    def _taken_over(self, why: str) -> Hosted:
        """Tell the user ``why``, and claim the job's folders anew; returns this."""
        told_of = f"{why}: process {os.getpid()} on host {host_name()}, which stood by, goes on in its place"
        self._telling.say(Event("coordinator", told_of), clock.now())
        self.coordinator.claim_anew()
        return self

    @staticmethod
    def _following(
        address: tuple[str, int], known: Known, secret: SecretFile, told: Callable[[Event], None], guard: int
    ) -> tuple[Coordinator, Telling]:
        board = known.board
        telling = Telling(address, secret.read(), guard, told, board.began)
        telling.run_dir = lambda: board.run_dir
        if board.start is not None:
            telling.go_on(board.start, clock.now())
        for event in known.events:
            telling.say_unless_said(event, clock.now())
        return Coordinator(0, telling.say, secret.read(), telling.claims.take, known), telling

    def watch_standby(self, guard: Pipe) -> None:
        """From now on tell the ``guard`` and the user which process could go on in this one's place."""

        def changes(pid: int) -> None:
            guard.tell(mirror=pid)
            there = f"standby process {pid} goes on if the coordinator's process dies"
            text = there if pid else "no standby on the coordinator's own host"
            self._telling.say(Event("standby", text, {"pid": pid}), clock.now())

        self.coordinator.mirror.watch(changes)

    async def close(self, closing: Callable[[], None] = lambda: None, at_once: bool = False) -> None:
        """End the coordinator once the other supervisors are gone, whose workers may train on without this one's.
        ``closing`` is called before that end. ``at_once``: don't wait for the supervisors.
        """
        if not at_once:
            await self.coordinator.all_gone(GOODBYE_S)
        closing()
        await self.leave()
        self._secret.remove()
        self._telling.close()
        if (folder := self._telling.report_folder) is not None:
            _begin_report(folder)

    async def leave(self) -> None:
        """End the coordinator, and leave what is the job's alone: the job may go on elsewhere."""
        await self.coordinator.close()
        self._keeping.cancel()

    async def _keep_secret(self) -> None:
        """Keep the secret's file in place, for workers that still come."""
        while await pause(KEEP_S):
            with suppress(NoSecret):  # nobody misses it until a worker comes
                self._secret.keep()


def _begin_report(folder: Path) -> None:
    """Write the report in a process of its own, which outlives this one. Its failures go nowhere, and the launcher's
    SIGTERM, meant for processes that train, does not end it.
    """
    try:
        subprocess.Popen(
            [sys.executable, "-m", "recycle_plugin.observability.report", str(folder)],
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        say(f"warning: no report ({error.strerror}): recycle report {folder} writes it")


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        what = f"is unknown on its own host ({error.strerror})"
        with suppress(OSError):
            socket.getaddrinfo(host, None, socket.AF_INET6)
            what = "has only an IPv6 address, and jobs listen at IPv4 ones"
        raise BadMaster(f"master address {host} {what}: {ANOTHER_ADDRESS}") from error


def _own_address(master: str) -> str:
    """Return the address to listen at: the master's, or ANYWHERE if it is not this host's own (translated)."""
    address = _resolved(master)
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return ANYWHERE
    return address


def host(environment: dict[str, str], line: socket.socket) -> int:
    """Run the coordinator at rank 0's guard. Return the job's exit code once all supervisors are gone."""
    address, ranks = address_of(environment), int(environment["WORLD_SIZE"])
    guard = Pipe(line)

    async def run() -> int:
        senders.spare_threads()
        if ranks > int(environment.get("LOCAL_SIZE", ranks)):
            _check_reachable(address[0])
        hosted = await Hosted.start(address, ranks, environment, partial(tell_folder, guard), os.getppid())
        reader, _ = await asyncio.open_connection(sock=line)
        return await until_through(hosted, guard, reader)

    return in_one_line(run)


def tell_folder(guard: Pipe, event: Event) -> None:
    if event.kind == "start":
        guard.tell(folder=event.details["job"]["run_dir"])
    elif event.kind == "standby" and "address" in event.details:
        guard.tell(elsewhere=bool(event.details["address"]))


async def until_through(hosted: Hosted, guard: Pipe, reader: asyncio.StreamReader) -> int:
    """Host until the job is over or goes on elsewhere. Return its exit code, or DEPOSED."""
    hosted.watch_standby(guard)
    guard.tell(ready=True)
    through = asyncio.Event()
    hearing = asyncio.create_task(_hear_guard(reader, hosted, through))
    ways = asyncio.create_task(through.wait()), asyncio.create_task(hosted.coordinator.deposed.wait())
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    deposed = ways[1].done()
    await (hosted.leave() if deposed else hosted.close(lambda: guard.tell(closing=True)))
    for task in (hearing, *ways):
        task.cancel()
    return DEPOSED if deposed else hosted.coordinator.code


def address_of(environment: dict[str, str]) -> tuple[str, int]:
    """Return the coordinator's address by the launcher."""
    return environment["MASTER_ADDR"], int(environment["MASTER_PORT"])


async def _until_free(start: Callable[[], Coroutine[None, None, None]], port: int) -> None:
    """Call ``start`` until ``port`` is free, which a process has held that has just ended. Raises BadMaster."""
    deadline = time.monotonic() + FREE_S
    while True:
        try:
            return await start()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise BadMaster(f"master port {port} is no longer available ({error.strerror})") from error
        await asyncio.sleep(LOOK_S)


async def _hear_guard(reader: asyncio.StreamReader, hosted: Hosted, through: asyncio.Event) -> None:
    """Pass on the guard's messages until it is gone, and its supervisor with it."""
    while said := await reader.readline():
        message = json.loads(said)
        if "signal" in message:
            hosted.coordinator.terminate(f"the guard of rank 0 on host {host_name()} got {message['signal']}")
        if "through" in message:
            through.set()
    through.set()


def _check_reachable(name: str) -> None:
    """Raise BadMaster for a loopback address, at which workers on other hosts can't reach the coordinator."""
    if ip_address(found := _resolved(name)).is_loopback:
        raise BadMaster(
            f"master address {name} is {found} on its own host, which other hosts can't reach: {ANOTHER_ADDRESS}"
        )


def in_one_line(run: Callable[[], Coroutine[None, None, int]]) -> int:
    """Return the exit code of ``run``, with one line on stderr if it could not begin."""
    try:
        return asyncio.run(run())
    except asyncio.CancelledError:  # told to end before anything was started
        return 1
    except (BadMaster, NoCredentials, OSError) as error:  # also where there is no room for a process or a connection
        say(f"error: {error}")
        return 1
