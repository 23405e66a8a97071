"""Each rank's supervisor: it outlives its worker and reports how the worker ended. Imports no torch.

The stock launcher kills all ranks as soon as one exits badly. A worker's death ends only the worker, so the launcher
needs no change. The launcher has started only the supervisor's guard (runtime/processes/guard.py), so a supervisor's
death ends nothing: the next one takes its place. Rank 0's guard also has the coordinator and the job's store
(runtime/processes/hosted.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from recycle_plugin.authentication.datagrams import SealedDatagrams
from recycle_plugin.authentication.handshake import Stranger
from recycle_plugin.authentication.secret import AT, SecretFile
from recycle_plugin.core.messages.from_coordinator import (
    Fence,
    ForkStandby,
    Lease,
    Over,
    Pace,
    Placed,
    Refused,
    Restart,
    Seated,
    ServeLogs,
    Stay,
    Welcome,
)
from recycle_plugin.core.messages.from_workers import (
    Exited,
    Hello,
    SupervisorHeartbeat,
    Terminate,
    Unguarded,
)
from recycle_plugin.core.messages.kept import BEATS
from recycle_plugin.core.vocabulary.deadlines import SUPERVISOR_BEAT_S
from recycle_plugin.core.vocabulary.describe import COORDINATOR_GONE, named
from recycle_plugin.errors import CutOff, NoCredentials
from recycle_plugin.runtime.control.connections import ControlWay
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.control.supervisor_heartbeat import HeartbeatSender
from recycle_plugin.runtime.processes import signal_senders as senders
from recycle_plugin.runtime.processes.hosted import ANOTHER_PORT, Hosted, first_of, in_one_line, pause
from recycle_plugin.runtime.processes.served_logs import ServedLogs
from recycle_plugin.runtime.processes.spawn import Process
from recycle_plugin.runtime.processes.worker_keeper import Guarded, Here
from recycle_plugin.runtime.system.console import say
from recycle_plugin.runtime.system.host import host_name
from recycle_plugin.runtime.system.process_life import is_dying, life_of

WORKER = "recycle_plugin.worker_process"  # the module that a worker runs
CONNECT_S = 60.0  # how long a supervisor tries to reach the coordinator
RESUME_S = 10.0  # the same after the connection has broken
LISTEN_S = 60.0  # how long silence is normal
SILENT = 3  # so many confirmations of the coordinator may be missing
LOOK_S = 0.1  # s between tries, and between looks whether the worker's process is dying
OVER_S = 2.0  # how long to resume if the job is over and the coordinator may be gone
ANSWER_S = 10.0  # how long the coordinator may take to hear of a worker's end
JOIN_S = 10.0  # how long a supervisor that joins tries to reach the coordinator
NOBODY = -1  # the rank of a supervisor that has none yet
END_S = 15.0  # how long a worker that was told to end may take
KILLED_S = 60.0  # how long the end of a killed worker may take, with much memory to give back


def _refused(stranger: Stranger, advice: str) -> NoCredentials | ConnectionError:
    """Return the error that ends a supervisor that has found no coordinator. ``advice``: if ``stranger`` has none."""
    return NoCredentials(str(stranger)) if stranger.advice else ConnectionError(f"{stranger}: {advice}")


class NotSeated(RuntimeError):
    """There is no seat for a supervisor that asks for one; the message says why. ``code``: the exit code."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


class Supervisor:
    """Runs one worker, and further ones when the coordinator orders it. ``command``: the training script with its
    arguments. ``place`` keeps the worker.

    With ``placement`` "spread" the worker's rank is not the one that the launcher gave this place
    (core/vocabulary/placement.py). ``hosted``: the coordinator, if it is in this process. ``joins``: if not None, the
    supervisor has no rank and asks for a lost worker's; if True, it waits for one.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        placement: str,
        place: Here | Guarded,
        hosted: Hosted | None = None,
        joins: bool | None = None,
    ) -> None:
        self._command = command
        self._placement = placement
        self._environment = environment
        self._place = place
        self._joins = joins
        self._rank = int(environment.get("RANK", NOBODY)) if place.rank is None else place.rank
        self._incarnation = place.incarnation  # of the worker or the next one
        self._address = place.coordinator or (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
        self._secret = SecretFile.of(environment)
        self._way = ControlWay(self._address, self._secret)
        self._heartbeats: HeartbeatSender | None = None
        self._every_s = SUPERVISOR_BEAT_S  # between two heartbeats
        self._datagrams: SealedDatagrams | None = None  # of the last connection with a Welcome
        self._hosted = hosted
        self._over: asyncio.Future[int]  # the job's exit code
        self._alone = False  # no process coordinates any more
        self._control: InLoop
        self._worker = place.worker
        self._started = place.worker is not None  # whether this incarnation's process was started
        self._orders: asyncio.Queue[Restart] = asyncio.Queue()
        self._fenced = -1  # the last fenced incarnation
        self._leaving = -1  # the last incarnation with no successor for now, mostly since it leaves as planned
        self._exited: Exited | None = None  # the worker's end, once it has ended
        self._answered = asyncio.Event()  # the coordinator has confirmed the worker's end
        self._logs: ServedLogs

    async def run(self) -> int:
        """Run the worker and its successors to their ends, and wait for the job's. Return the launcher's exit code: 0
        also if the worker was killed and the job went on. Raises ConnectionError without a coordinator, NotSeated.
        """
        try:
            if self._placement == "spread" and self._rank != NOBODY and self._place.rank is None:
                self._rank = await self._placed()
            return await self._supervise()
        finally:
            if self._worker is not None:  # the wait for the job's end was broken off
                self._fence()

    def _told_to_end(self, what: str) -> None:
        """Handle a signal that ends the job. If the worker has left as planned, only this supervisor ends; at rank 0's
        guard the signal is for the whole job even then.
        """
        nobody = self._worker is None or self._fenced >= self._incarnation
        if nobody and self._leaving >= self._incarnation and self._environment.get("RANK") != "0":
            if not self._over.done():
                self._over.set_result(0)
        else:
            self._tell(Terminate(self._rank, what, host_name()))

    def pass_on(self, number: int) -> None:
        """Send the worker a signal that is the script's, if there is a worker."""
        if self._worker is not None:
            with suppress(ProcessLookupError):  # it has ended just now
                self._worker.send_signal(number)

    async def _connect(self) -> InLoop:
        if self._hosted is not None:
            return InLoop(self._hosted.coordinator.connect())
        try:
            return await InLoop.connect(self._way, CONNECT_S if self._worker is None else RESUME_S)
        except Stranger as stranger:
            raise _refused(stranger, ANOTHER_PORT) from stranger

    async def _placed(self) -> int:
        """Return the worker's rank, which depends on where all the others are."""
        deadline, placed = time.monotonic() + CONNECT_S, None
        while placed is None and (left_s := deadline - time.monotonic()) > 0:  # the coordinator may die meanwhile
            control = await self._connect()
            control.send(Hello(self._rank, "placing", os.getpid(), host_name()))
            placed = await control.receive(left_s)
            control.close()
            await pause(0.0 if placed else LOOK_S)
        if not isinstance(placed, Placed):
            raise ConnectionError(
                f'place {self._rank} has got no rank within {CONNECT_S:.0f} s: with recycle.placement "spread" all '
                "supervisors have to be there first, "
                "and all need the same config; see whether each host has started"
            )
        return placed.rank

    @property
    def _hello(self) -> Hello:
        return Hello(self._rank, "supervisor", self._place.pid, host_name())

    async def _welcomed(self, hello: Hello, advice: str) -> Welcome:
        self._tell(hello)
        began, welcome = time.monotonic(), await self._control.receive(CONNECT_S)
        while welcome is None and self._may_be_another(began):
            await pause(LOOK_S)
            self._control.close()
            self._control = await self._connect()
            self._tell(hello)
            welcome = await self._control.receive(CONNECT_S)
        if not isinstance(welcome, Welcome):
            why = f" ({self._control.broken})" if self._control.broken else ""
            raise ConnectionError("{}:{} answers, but is no coordinator{}: {}".format(*self._address, why, advice))
        self._datagrams = self._control.datagrams
        return welcome

    def _may_be_another(self, began: float) -> bool:
        """Return whether the coordinator may have died before its answer, so that another process takes its place."""
        broken = self._control.broken
        late = time.monotonic() - began > RESUME_S
        return broken is not None and broken.unreadable is None and self._hosted is None and not late

    async def _supervise(self) -> int:
        gone = asyncio.create_task(self._place.gone())
        try:
            if self._rank != NOBODY:
                self._control = await self._connect()
                welcome: Welcome | None = await self._welcomed(self._hello, ANOTHER_PORT)
            else:
                welcome = await first_of(self._ask_for_a_seat(), gone)
            if welcome is None:
                raise ConnectionError("the process that the launcher has started is gone")
            self._welcome = welcome
            return await self._listening(gone)
        finally:
            gone.cancel()

    async def _listening(self, gone: asyncio.Task[Any]) -> int:
        self._over = asyncio.get_running_loop().create_future()
        self._logs = ServedLogs(self._rank, self._welcome.job_id, self._secret, self._tell)
        listening, serving = asyncio.create_task(self._listen()), asyncio.create_task(self._logs.run())
        listening.add_done_callback(partial(self._see_ended, "hear the coordinator"))
        try:
            if not self._started and not self._incarnation and self._orders.empty():
                self._place.next(self._rank, 0)
                await self._start()
            self._place.on_signal(self._told_to_end)
            return await self._one_after_another(gone)
        finally:
            listening.cancel()
            serving.cancel()
            await asyncio.wait({serving})
            self._control.close()
            if self._heartbeats is not None:
                self._heartbeats.close()

    def _see_ended(self, what: str, task: asyncio.Task[None]) -> None:
        """End the job here if an error has ended a ``task``, as without room for a thread: nothing else would."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._over.done():
            say(f"error: the supervisor of {named(self._rank)} can't {what} any more: {error!r}")
            self._over.set_result(1)

    # --- a seat that was lost --------------------------------------------------------------------

    async def _ask_for_a_seat(self) -> Welcome:
        """Ask for the rank of a lost worker until there is one, with an order to start its process."""
        advice = "write the address and port of the job's master behind --join"
        while True:
            try:
                self._control = await InLoop.connect(self._way, JOIN_S)
            except Stranger as stranger:
                raise _refused(stranger, advice) from stranger
            except ConnectionError as error:
                raise ConnectionError(
                    "nothing answers at {}:{} ({}): {}, and see whether the job still runs".format(
                        *self._address, error.__cause__ or error, advice
                    )
                ) from error
            hello = Hello(NOBODY, "joining", self._place.pid, host_name(), waits=bool(self._joins))
            self._welcome = await self._welcomed(hello, advice)
            while self._control.broken is None or await self._stands_again(hello, RESUME_S):
                match await self._control.receive(LISTEN_S):
                    case Seated() as seated:
                        self._rank = seated.rank
                    case Restart() as order:
                        self._orders.put_nowait(order)
                        return self._welcome
                    case Refused() as refused:
                        raise NotSeated(refused.reason, refused.code)
            self._control.close()

    # --- one worker after another ----------------------------------------------------------------

    @property
    def _addresses(self) -> list[tuple[str, int]]:
        """Where the worker looks for the coordinator: at its address, and at its standby's on another host."""
        elsewhere = self._control.elsewhere
        return [self._address] if elsewhere in (None, self._address) else [self._address, elsewhere]

    def _worker_environment(self) -> dict[str, str]:
        return self._environment | {
            **({} if self._joins is None else {"WORLD_SIZE": str(self._welcome.ranks)}),
            "RANK": str(self._rank),
            "RECYCLE_PLACEMENT": self._placement,
            "RECYCLE_INCARNATION": str(self._incarnation),
            "MASTER_PORT": str(self._address[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank is to listen at the master's port
            "MASTER_ADDR": self._address[0],
            "RECYCLE_COORDINATOR": ",".join(f"{host}:{port}" for host, port in self._addresses),
            AT: str(self._secret.path),
        }

    async def _start(self) -> None:
        self._started = True
        self._worker = await self._place.start(WORKER, self._command, self._worker_environment())
        if self._fenced >= self._incarnation:  # meanwhile
            self._fence()

    async def _one_after_another(self, gone: asyncio.Task[Any]) -> int:
        """Wait for the end of the worker and of those that follow it, then for the job's. Return early if the guard is
        ``gone``.

        A worker that ends by itself while the plugin was never enabled gives its own code to the launcher, which then
        does what it always does. The supervisor also ends at once with a worker that is cut off, if it hears nothing of
        the coordinator either, and with a worker whose script is through.
        """
        code = -signal.SIGKILL  # of the last worker
        while True:
            if self._worker is not None:
                code = await self._until_ended(self._worker, gone)
                if gone.done():
                    break
                self._say_exited(code)
                if code == CutOff.code and not await self._is_answered():
                    return code
                if code == 0:
                    job_code = self._over.result() if self._over.done() else 0
                    if not await self._is_to_stay():
                        return job_code
            if not await self._next_has_started(gone):
                break
        if gone.done():
            return await self._without_guard(code)
        job_code = self._over.result()
        return job_code if job_code == 0 or code < 0 else code

    async def _until_ended(self, worker: Process, gone: asyncio.Task[Any]) -> int:
        """Return the worker's exit code; end the worker once the job is over."""
        exit_code = asyncio.create_task(worker.wait())
        heartbeats = asyncio.create_task(self._send_heartbeats(worker))
        heartbeats.add_done_callback(partial(self._see_ended, "send heartbeats"))
        try:
            await asyncio.wait({exit_code, self._over, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not exit_code.done() and not gone.done():
                await self._end_worker(worker, exit_code)
            return exit_code.result() if exit_code.done() else -signal.SIGKILL
        finally:
            self._worker = None if exit_code.done() else worker
            exit_code.cancel()
            heartbeats.cancel()

    async def _next_has_started(self, gone: asyncio.Task[Any]) -> bool:
        """Start the next worker when the coordinator orders it. A failed start counts as the worker's death. So does an
        order that was taken back: if this host was silent meanwhile, it is heard of again. Return False if the job is
        over or the guard gone before.
        """
        order = await first_of(self._ordered(), self._over, gone)
        if order is None:
            return False
        self._incarnation, self._started, self._exited = order.incarnation, False, None
        self._answered.clear()
        self._place.next(self._rank, self._incarnation)
        if order.after_s and await first_of(pause(order.after_s), self._over, gone) is None:
            return False
        if self._fenced >= self._incarnation:
            self._started = True
            self._say_exited(-signal.SIGKILL)
            return True
        try:
            await self._start()
        except ConnectionError as error:
            say(f"warning: {error}")
            self._say_exited(1)
        return True

    async def _ordered(self) -> Restart:
        """Return the coordinator's next order that is not carried out yet; an order may come twice."""
        while True:
            order = await self._orders.get()
            done = order.incarnation < self._incarnation + self._started
            if order.rank == self._rank and not done:
                return order

    def _say_exited(self, code: int) -> None:
        self._exited = Exited(self._rank, code, time.time(), incarnation=self._incarnation)
        self._tell(self._exited)

    async def _without_guard(self, code: int) -> int:
        """Report that the guard was killed: the job may be about to be ended so, and the coordinator has to know."""
        self._tell(Unguarded(self._rank, self._place.pid, incarnation=self._incarnation))
        self._say_exited(code)
        await self._is_answered()
        return 1

    async def _is_answered(self) -> bool:
        """Wait until the coordinator confirms the worker's end, or the job ends; return whether it has confirmed."""
        await first_of(self._answered.wait(), self._over, timeout_s=ANSWER_S)
        return self._answered.is_set()

    async def _is_to_stay(self) -> bool:
        """Return whether the worker has left as planned and its seat may return: known before its end is confirmed."""
        if not self._over.done():
            await self._is_answered()
        return self._leaving >= self._incarnation and not self._over.done()

    async def _end_worker(self, worker: Process, exit_code: asyncio.Task[Any]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            done, _ = await asyncio.wait({exit_code}, timeout=END_S)
            if done:
                return
            if self._alone and number == signal.SIGTERM:  # the worker has not said so
                say(f"the job ends: {COORDINATOR_GONE}; the process of {named(self._rank)} runs on, and is ended")
            worker.send_signal(number)
        if not (await asyncio.wait({exit_code}, timeout=KILLED_S))[0]:  # it is stuck in a driver, say
            say(f"warning: the process of {named(self._rank)} does not end, though it was killed")

    async def _send_heartbeats(self, worker: Process) -> None:
        """Report at intervals the state of the worker's process, and soon if it begins to die; also by datagram if the
        last report is held up.
        """
        on_disk_s = 0.0  # time spent waiting for a disk, or for swapped memory, counts as work
        while not self._over.done():
            held_up = self._control.held_up
            state, cpu_s = life_of(worker.pid)
            on_disk_s += self._every_s * (state == "D")
            used_s = None if cpu_s is None else cpu_s + on_disk_s
            dying = is_dying(worker.pid)
            message = SupervisorHeartbeat(self._rank, state == "T", used_s, dying, incarnation=self._incarnation)
            self._tell(message)
            if held_up and self._datagrams is not None and self._control.there is not None:
                with suppress(OSError):  # there is no route yet: the network is down
                    self._heartbeats = self._heartbeats or await HeartbeatSender.to(self._control.there)
                    self._heartbeats.send(message, self._datagrams)
            next_at = time.monotonic() + self._every_s
            while (left_s := next_at - time.monotonic()) > 0 and (dying or not is_dying(worker.pid)):
                await asyncio.sleep(left_s if dying else min(left_s, LOOK_S))
            self._control.give_up_unless_heard(SILENT * BEATS)

    def _fence(self) -> None:
        """Kill the worker: the others go on without it, and it must not wake up."""
        self.pass_on(signal.SIGKILL)

    async def _listen(self) -> None:
        while self._control.broken is None or await self._resumed():
            message = await self._control.receive(LISTEN_S)
            match message:
                case Fence(rank=rank) if rank == self._rank:
                    self._fenced = max(self._fenced, message.incarnation)
                    if message.incarnation == self._incarnation:
                        self._fence()
                case Restart():
                    self._orders.put_nowait(message)
                case ForkStandby(rank=rank) if rank == self._rank:
                    self._place.stand_by(self._address)
                case ServeLogs(rank=rank) if rank == self._rank:
                    self._logs.serve(message.folder)
                case Pace():
                    self._every_s = message.every_s
                    self._control.bear_silence(message.silent_s)
                case Stay():
                    self._leaving = max(self._leaving, message.incarnation)
                case Lease(number=number) if number == self._incarnation:
                    self._answered.set()
                case Over() if not self._over.done():
                    self._over.set_result(message.code)
        if not self._over.done():
            broken = self._control.broken
            self._alone = broken is None or broken.unreadable is None  # else another line has said why
            self._over.set_result(1)

    async def _resumed(self) -> bool:
        """Restore the broken connection, and repeat a worker's end if not confirmed. Return whether it stands."""
        broken = self._control.broken
        if broken is not None and broken.unreadable is not None:
            say(f"error: the coordinator has sent an unreadable message: {broken}")
            return False
        if not await self._stands_again(self._hello, OVER_S if self._over.done() else RESUME_S):
            return False
        if self._exited is not None and not self._answered.is_set():
            self._tell(self._exited)
        return True

    async def _stands_again(self, hello: Hello, timeout_s: float) -> bool:
        """Resume the connection, perhaps at another address. Return whether it stands."""
        welcome = await self._control.resume(hello, timeout_s)
        if welcome is None:
            return False
        self._welcome, self._datagrams = welcome, self._control.datagrams
        address = self._control.address
        if address is not None and address != self._address:
            self._address, self._way = address, ControlWay(address, self._secret)
            self._place.follow(address)
            if self._heartbeats is not None:
                self._heartbeats.close()
                self._heartbeats = None
        return True

    def _tell(self, message: object) -> None:
        self._control.send(message)


def supervise(
    command: list[str],
    environment: dict[str, str],
    placement: Callable[[list[str]], str],
    joins: bool | None,
    line: socket.socket,
) -> int:
    """Run one rank's supervisor at its end of the guard's ``line``; return the exit code. ``joins``: see Supervisor."""

    async def run() -> int:
        senders.spare_threads()
        place = await Guarded.take(line)
        if place is None:
            return 1
        try:
            return await Supervisor(command, environment, placement(command), place, joins=joins).run()
        except NoCredentials:  # the same for all supervisors of this host
            if environment.get("LOCAL_RANK", "0") == "0":
                raise
            return 1
        except NotSeated as found:
            say(f"{'error: ' * bool(found.code)}{found}")
            return found.code

    return in_one_line(run)
