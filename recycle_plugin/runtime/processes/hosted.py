"""What the host of rank 0 has: the coordinator, on the launcher's own master port, and the job's key-value store.

Rank 0's guard hosts them (runtime/processes/guard.py), or the launcher for one host.  Workers learn the store's port
through ``MASTER_PORT``, so stock ``env://`` finds it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from recycle_plugin.authentication.secret import NoSecret, SecretFile
from recycle_plugin.core.coordinator.output import Event
from recycle_plugin.core.vocabulary.describe import how_ended
from recycle_plugin.errors import NoCredentials
from recycle_plugin.observability.console import Announcer
from recycle_plugin.observability.exporter import Exporter
from recycle_plugin.runtime.control.claims import Claims
from recycle_plugin.runtime.control.connections import InProcess
from recycle_plugin.runtime.control.coordinator import Coordinator
from recycle_plugin.runtime.control.operator_access import OperatorAccess
from recycle_plugin.runtime.processes import signal_senders as senders
from recycle_plugin.runtime.processes.guard import Pipe
from recycle_plugin.runtime.processes.spawn import Process, spawn
from recycle_plugin.runtime.system import clock
from recycle_plugin.runtime.system.console import say

GOODBYE_S = 30.0  # how long rank 0 waits for the other supervisors once the job is over
STORE_S = 5.0  # how long the store's process may take to be gone, once it is killed
KEEP_S = 3600.0  # between two looks after the secret's file
ANOTHER_PORT = "start the launcher with --master_port and a free one"
OF_TORCHRUN = "it follows from torchrun's own port: start torchrun again, with another --master_port if it has one"
ANOTHER_ADDRESS = (
    "start the launcher with --master_addr (srun: with MASTER_ADDR set) and an address that is that host's for all "
    "others"
)
ANYWHERE = "0.0.0.0"


async def pause(seconds: float) -> bool:
    """Let ``seconds`` pass; true."""
    await asyncio.sleep(seconds)
    return True


class BadMaster(RuntimeError):
    """The master's address or port can't be used; the message says what to give the launcher instead."""


class Hosted:
    """The coordinator and the store's process, which rank 0's guard, or the launcher for one host, hosts."""

    def __init__(
        self,
        coordinator: Coordinator,
        store: Process,
        access: OperatorAccess,
        announcer: Announcer,
        exporter: Exporter,
        secret: SecretFile,
        claims: Claims,
    ) -> None:
        self._coordinator = coordinator
        self._store = store
        self._access = access
        self._announcer = announcer
        self._exporter = exporter
        self._secret, self._claims = secret, claims
        self._closing = False
        self._watching = asyncio.create_task(self._watch_store())
        self._keeping = asyncio.create_task(self._keep_secret())

    @classmethod
    async def start(
        cls,
        address: tuple[str, int],
        ranks: int,
        environment: dict[str, str],
        told: Callable[[Event], None] = lambda event: None,
        stop: int | None = None,
    ) -> Hosted:
        """Start the coordinator and the store's process, and make the job's secret.  Raises BadMaster where the port of
        ``address`` is taken, and NoCredentials.

        ``told`` gets all events, as the user does; ``stop`` is the process that ends the job at SIGTERM, where it is
        not this one.
        """
        file, here = SecretFile.of(environment | {"MASTER_PORT": str(address[1])}), _own_address(address[0])
        secret, listener = file.make(), socket.create_server((here, 0), backlog=4096)
        announcer = Announcer(stop or os.getpid())

        def say(event: Event, now: float) -> None:
            announcer.say(event, now, coordinator.run_dir)
            if event.kind == "start" and (refused := access.write(Path(coordinator.run_dir))):
                announcer.say(Event("warning", refused), now)
            told(event)
            exporter.take(event, now)

        exporter = Exporter(lambda event: say(event, clock.now()))
        access = OperatorAccess(address, secret)
        claims = Claims(lambda text: say(Event("warning", text), clock.now()))
        coordinator = Coordinator(ranks, listener.getsockname()[1], say, secret, claims.take)
        try:
            await coordinator.start(here, address[1], file.put)
        except OSError as error:
            advice = OF_TORCHRUN if "TORCHELASTIC_RUN_ID" in environment else ANOTHER_PORT
            raise BadMaster(f"master port {address[1]} cannot be used ({error.strerror}): {advice}") from error
        if here == ANYWHERE:
            text = f"{address[0]} is no address of this host, so coordinator and store listen at all of its addresses"
            say(Event("warning", text), clock.now())
        os.set_inheritable(listener.fileno(), True)
        store = await spawn(
            "recycle_plugin.runtime.processes.store_host",
            [str(listener.fileno())],
            environment,
            keep_fd=listener.fileno(),
        )
        listener.close()
        return cls(coordinator, store, access, announcer, exporter, file, claims)

    def connect(self) -> InProcess:
        """A connection to the coordinator from within this process."""
        return self._coordinator.connect()

    def terminate(self, reason: str) -> None:
        """End the job: at a commit if training has started."""
        self._coordinator.terminate(reason)

    @property
    def code(self) -> int:
        """The exit code that the job has ended with, 0 where it has not ended."""
        return self._coordinator.code

    async def close(self, closing: Callable[[], None] = lambda: None, at_once: bool = False) -> None:
        """End coordinator and store, after the other supervisors have gone, whose workers may train on without this
        one's.

        ``at_once``: without waiting for them.  ``closing`` is called once they have gone.
        """
        if not at_once:
            await self._coordinator.all_gone(GOODBYE_S)
        closing()
        await self._coordinator.close()
        self._closing = True
        if not self._watching.done():
            self._store.send_signal(signal.SIGKILL)
        # one that was forked from a stopped process is never heard of
        await asyncio.wait({self._watching}, timeout=STORE_S)
        self._watching.cancel()
        self._keeping.cancel()
        self._secret.remove()
        folder = self._announcer.folder if self._announcer.wants_report else None
        if folder is not None:
            self._announcer.say(Event("report", f"{folder / 'report.html'} is being written"), clock.now())
        self._access.remove()
        self._announcer.close()
        self._exporter.close()
        self._claims.release()
        if folder is not None:
            _begin_report(folder)

    async def _keep_secret(self) -> None:
        """Have the secret's file stay where it is, for workers that are still to come."""
        while await pause(KEEP_S):
            with suppress(NoSecret):  # as long as nobody comes, nobody misses it
                self._secret.keep()

    async def _watch_store(self) -> None:
        """Fail the job where the store's process ends: without it workers could not find each other, and would wait for
        it.
        """
        how = how_ended(await self._store.wait())
        if not self._closing:
            self._coordinator.fail(f"the key-value store's process {how}; without it workers can't find each other")


def _begin_report(folder: Path) -> None:
    """Write the report in a process of its own, which outlives this one.

    Nobody waits for it, and nothing that goes wrong in it gets out of it.  The launcher's SIGTERM is for those that
    train.
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
        raise BadMaster(
            f"master address {host} is unknown on its own host ({error.strerror}): {ANOTHER_ADDRESS}"
        ) from error


def _own_address(master: str) -> str:
    """The address at which the master's host listens: the one that all others reach, or ANYWHERE where that is none of
    its own, as behind an address that is translated.
    """
    address = _resolved(master)
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return ANYWHERE
    return address


def host(environment: dict[str, str], line: socket.socket) -> int:
    """Run rank 0's coordinator and store at the end of its guard's ``line``; returns the job's exit code.

    It returns once the supervisor there has gone, and then the others.
    """
    address, ranks = (environment["MASTER_ADDR"], int(environment["MASTER_PORT"])), int(environment["WORLD_SIZE"])
    guard = Pipe(line)

    def told(event: Event) -> None:
        if event.kind == "start":
            guard.tell(folder=event.details["job"]["run_dir"])

    async def run() -> int:
        senders.spare_threads()
        if ranks > int(environment.get("LOCAL_SIZE", ranks)):
            _check_reachable(address[0])
        hosted = await Hosted.start(address, ranks, environment, told, os.getppid())
        guard.tell(ready=True)
        reader, _ = await asyncio.open_connection(sock=line)
        through = asyncio.Event()
        hearing = asyncio.create_task(_hear_guard(reader, hosted, through))
        await through.wait()
        await hosted.close(lambda: guard.tell(closing=True))
        hearing.cancel()
        return hosted.code

    return in_one_line(run)


async def _hear_guard(reader: asyncio.StreamReader, hosted: Hosted, through: asyncio.Event) -> None:
    """Pass the guard's messages on until it is gone, and its supervisor with it."""
    while said := await reader.readline():
        message = json.loads(said)
        if "signal" in message:
            hosted.terminate(f"the guard of rank 0 on host {socket.gethostname()} got {message['signal']}")
        if "through" in message:
            through.set()
    through.set()


def _check_reachable(name: str) -> None:
    """Raise BadMaster for a loopback address, which workers on other hosts could not reach the coordinator at."""
    if ip_address(found := _resolved(name)).is_loopback:
        raise BadMaster(
            f"master address {name} is {found} on its own host, where no other host reaches anybody: {ANOTHER_ADDRESS}"
        )


def in_one_line(run: Callable[[], Coroutine[None, None, int]]) -> int:
    """The exit code of ``run``, with one line on stderr where it could not begin."""
    try:
        return asyncio.run(run())
    except asyncio.CancelledError:  # told to end before there was anything to end
        return 1
    except (BadMaster, NoCredentials, ConnectionError) as error:
        say(f"error: {error}")
        return 1
