"""The per-rank process that the launcher starts: it outlives its worker and tells how that ended.

Imports no torch.  The stock launcher kills all ranks as soon as one exits badly; since a worker's
death ends only the worker and not its supervisor, the launcher needs no change.  The supervisor of
rank 0 also hosts the coordinator, on the launcher's own master port, and the job's key-value
store; workers learn the store's port through ``MASTER_PORT``, so stock ``env://`` finds it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Callable

from recycle_plugin.core.encoding import encode
from recycle_plugin.core.output import Event
from recycle_plugin.core.protocol import Exited, Fence, Heard, Hello, Over, Placed, Pulse, Terminate, Welcome
from recycle_plugin.core.roster import WorkerId
from recycle_plugin.runtime import pulse
from recycle_plugin.runtime.announce import Announcer
from recycle_plugin.runtime.control import InLoop, InProcess
from recycle_plugin.runtime.coordinator import Coordinator
from recycle_plugin.runtime.descriptors import TooFewDescriptors, provide
from recycle_plugin.runtime.errors import CutOff
from recycle_plugin.runtime.slurm import NoPlace, described
from recycle_plugin.runtime.spawn import Process, how_ended, spawn

CONNECT_S = 60.0  # how long a supervisor tries to reach the coordinator
RESUME_S = 5.0  # the same once more, where the connection has broken
LISTEN_S = 60.0  # how long nothing need be heard
GOODBYE_S = 30.0  # how long rank 0 waits for the other supervisors once the job is over
PULSE_S = 0.5  # between two signs of the worker's life
ANSWER_S = 10.0  # how long the coordinator may take to hear of a worker's end
STORE_S = 5.0  # how long the store's process may take to be gone, once it is killed
REPORT_S = 60.0  # how long the report may take
ANOTHER_ADDRESS = "start the launcher with --master_addr (srun: with MASTER_ADDR set) and an address that is that host's for all others"
END_S = 15.0  # how long a worker that was told to end may take


class BadMaster(RuntimeError):
    """The master's address or port can't be used; the message says what to give the launcher instead."""


class Supervisor:
    """Runs one worker: ``command`` is the training script with its arguments.

    ``placement`` "spread": the worker's rank is not the one that the launcher gave this place (core/placement.py).
    """

    def __init__(self, command: list[str], environment: dict[str, str], placement: str) -> None:
        self._command = command
        self._placement = placement
        self._environment = environment
        self._rank = int(environment["RANK"])
        self._address = (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
        self._hosted: Hosted | None = None
        self._over: asyncio.Future[int] | None = None
        self._control: InLoop | None = None
        self._worker: Process | None = None
        self._exited: Exited | None = None  # the worker, once it has
        self._answered = asyncio.Event()  # the news of the worker's end have got there

    async def run(self) -> int:
        """The exit code for the launcher: 0 also when the worker was killed and the job went on."""
        if self._rank == 0:
            self._hosted = await self._host()
        try:
            return await self._run(self._take_signals)
        finally:
            if self._hosted is not None:
                await self._hosted.close()

    async def run_at(self, hosted: Hosted) -> int:
        """The same beside other supervisors in one process, whose signals are not for this one; ``hosted``: what rank 0 would run."""
        self._hosted = hosted
        return await self._run(lambda: None)

    async def _run(self, started: Callable[[], None]) -> int:
        if self._placement == "spread":
            self._rank = await self._placed()
        return await self._supervise(started)

    def _take_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._tell, Terminate(self._rank, f"a supervisor got {number.name}"))

    async def _host(self) -> Hosted:
        """Workers tell each other the addresses at which they reach the coordinator: over a loopback that is none for other hosts."""
        ranks = int(self._environment["WORLD_SIZE"])
        several = ranks > int(self._environment.get("LOCAL_SIZE", ranks))
        if several and ip_address(found := _resolved(self._address[0])).is_loopback:
            raise BadMaster(f"master address {self._address[0]} is {found} on its own host, where no other host reaches anybody: {ANOTHER_ADDRESS}")
        return await Hosted.start(self._address, ranks, self._environment)

    async def _connect(self) -> InLoop:
        if self._hosted is not None:
            return InLoop(self._hosted.connect())
        return await InLoop.connect(self._address, CONNECT_S)

    async def _placed(self) -> int:
        """The worker's rank, which depends on where all the others are."""
        control = await self._connect()
        control.send(Hello(self._rank, "placing", os.getpid(), socket.gethostname()))
        placed = await control.receive(CONNECT_S)
        control.close()
        if not isinstance(placed, Placed):
            raise ConnectionError(
                f'place {self._rank} has got no rank within {CONNECT_S:.0f} s: with recycle.placement "spread" all supervisors have to be there first, '
                "and all need the same config; see whether each host has started"
            )
        return placed.rank

    @property
    def _hello(self) -> Hello:
        return Hello(self._rank, "supervisor", os.getpid(), socket.gethostname())

    async def _supervise(self, started: Callable[[], None]) -> int:
        self._control = await self._connect()
        self._tell(self._hello)
        welcome = await self._control.receive(CONNECT_S)
        if not isinstance(welcome, Welcome):
            why = f" ({self._control.broken})" if self._control.broken else ""
            raise ConnectionError("{}:{} answers, but is no coordinator{}: start the launcher with --master_port and a free one".format(*self._address, why))
        self._over = asyncio.get_running_loop().create_future()
        tasks = [asyncio.create_task(self._listen())]
        try:
            self._worker = await spawn("recycle_plugin.worker", self._command, self._worker_environment(welcome.store_port))
            tasks.append(asyncio.create_task(self._pulse()))
            started()
            return await self._until_both_ended(self._worker)
        finally:
            for task in tasks:
                task.cancel()
            self._control.close()
            if self._worker is not None:  # nobody waits for the job's end any more
                self._fence()

    def _worker_environment(self, store_port: int) -> dict[str, str]:
        host, port = self._address
        return self._environment | {
            "RANK": str(self._rank),
            "RECYCLE_PLACEMENT": self._placement,
            "MASTER_PORT": str(store_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours, every rank is its client
            "RECYCLE_COORDINATOR": f"{host}:{port}",
        }

    async def _until_both_ended(self, worker: Process) -> int:
        """Wait for the worker's end, and then for the job's.

        A worker that ends by itself while the plugin was never enabled ends its supervisor with its
        own code: then the launcher does what it always does.  So does one that hears nothing of the
        coordinator, where its supervisor doesn't either.
        """
        exit_code = asyncio.create_task(worker.wait())
        await asyncio.wait({exit_code, self._over}, return_when=asyncio.FIRST_COMPLETED)
        if not exit_code.done():
            await self._end_worker(worker, exit_code)
        code, self._worker = exit_code.result(), None
        self._exited = Exited(self._rank, code, time.time())
        self._tell(self._exited)
        if code == CutOff.code:
            await asyncio.wait({asyncio.create_task(self._answered.wait()), self._over}, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            if not self._answered.is_set():
                return code
        if code == 0:
            return await self._over if self._over.done() else 0
        job_code = await self._over
        return job_code if job_code == 0 or code < 0 else code

    async def _end_worker(self, worker: Process, exit_code: asyncio.Task) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            done, _ = await asyncio.wait({exit_code}, timeout=END_S)
            if done:
                return
            worker.send_signal(number)
        await exit_code

    async def _pulse(self) -> None:
        """Say now and then that the worker's process is there, and whether it runs; over a network also by datagram."""
        datagrams = await pulse.connect(self._control.there) if self._control.there else None
        try:
            while self._worker is not None and not self._over.done():
                message = Pulse(self._rank, is_stopped(self._worker.pid))
                self._tell(message)
                if datagrams is not None:
                    datagrams.sendto(encode(message))
                await asyncio.sleep(PULSE_S)
        finally:
            if datagrams is not None:
                datagrams.close()

    def _fence(self) -> None:
        """Whoever goes on does so without the worker: it must not wake up."""
        try:
            if self._worker is not None:
                self._worker.send_signal(signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended by itself

    async def _listen(self) -> None:
        while self._control.broken is None or await self._resumed():
            message = await self._control.receive(LISTEN_S)
            if isinstance(message, Fence) and message.worker == WorkerId(self._rank):
                self._fence()
            if isinstance(message, Heard):
                self._answered.set()
            if isinstance(message, Over) and not self._over.done():
                self._over.set_result(message.code)
        if not self._over.done():
            self._over.set_result(1)  # the coordinator is gone

    async def _resumed(self) -> bool:
        """The connection has broken: it is made once more, and the worker goes on meanwhile.  What was said since the break is said again where it counts."""
        if self._over.done():
            return False
        if self._control.broken.unreadable is not None:
            print(f"recycle: error: the coordinator can't be understood: {self._control.broken}", file=sys.stderr, flush=True)
            return False
        if not await self._control.resume(self._hello, RESUME_S) or not isinstance(await self._control.receive(RESUME_S), Welcome):
            return False
        if self._exited is not None and not self._answered.is_set():
            self._tell(self._exited)
        return True

    def _tell(self, message: object) -> None:
        self._control.send(message)


class Hosted:
    """What only rank 0's supervisor runs, or the launcher for one host: the coordinator and the store's process."""

    def __init__(self, coordinator: Coordinator, store: Process, announcer: Announcer) -> None:
        self._coordinator = coordinator
        self._store = store
        self._announcer = announcer
        self._closing = False
        self._watching = asyncio.create_task(self._watch_store())

    @classmethod
    async def start(cls, address: tuple[str, int], ranks: int, environment: dict[str, str]) -> Hosted:
        listener = socket.create_server(("", 0), backlog=4096)
        announcer = Announcer()
        coordinator = Coordinator(ranks, listener.getsockname()[1], announcer.say)
        try:
            await coordinator.start("0.0.0.0", address[1])
        except OSError as error:
            raise BadMaster(
                f"master port {address[1]} cannot be used ({error.strerror}): start the launcher with --master_port and a free one"
            ) from error
        os.set_inheritable(listener.fileno(), True)
        store = await spawn("recycle_plugin.runtime.store", [str(listener.fileno())], environment, keep_fd=listener.fileno())
        listener.close()
        return cls(coordinator, store, announcer)

    def connect(self) -> InProcess:
        """To the coordinator."""
        return self._coordinator.connect()

    def terminate(self, reason: str) -> None:
        """End the job, at a commit if training has started."""
        self._coordinator.terminate(reason)

    async def close(self) -> None:
        """Outlive the other supervisors, whose workers may train on without this one's."""
        await self._coordinator.all_gone(GOODBYE_S)
        await self._coordinator.close()
        self._closing = True
        if not self._watching.done():
            self._store.send_signal(signal.SIGKILL)
        await asyncio.wait({self._watching}, timeout=STORE_S)  # one that was forked from a stopped process is never heard of
        self._watching.cancel()
        if self._announcer.wants_report:
            self._announcer.say(await _write_report(self._announcer.folder), time.time())
        self._announcer.close()

    async def _watch_store(self) -> None:
        """Without the store workers could not even find each other, and would wait for it."""
        how = how_ended(await self._store.wait())
        if not self._closing:
            self._coordinator.fail(f"the key-value store's process {how}; without it workers can't find each other")


async def _write_report(folder: Path) -> Event:
    """In a process of its own, which nothing that goes wrong in it gets out of.  The launcher's SIGTERM is for those that train."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "recycle_plugin.cli", "report", str(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(process.communicate(), REPORT_S)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        return Event("warning", f"no report within {REPORT_S:.0f} s: recycle report {folder} writes it")
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    return Event("warning", f"no report: {last}") if process.returncode else Event("report", last)


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise BadMaster(f"master address {host} is unknown on its own host ({error.strerror}): {ANOTHER_ADDRESS}") from error


def is_stopped(pid: int) -> bool:
    """Whether the process has got SIGSTOP or the like."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has just ended
        return False


def main(command: list[str], placement: str = "deepspeed") -> int:
    try:
        environment = described(os.environ)
        provide(int(environment["WORLD_SIZE"]))
        return asyncio.run(Supervisor(command, environment, placement).run())
    except TooFewDescriptors as error:  # which is so for all of this host
        return _failed(error) if environment.get("LOCAL_RANK", "0") == "0" else 1
    except (BadMaster, ConnectionError, NoPlace) as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    print(f"recycle: error: {error}", file=sys.stderr, flush=True)
    return 1
