"""The coordinator's server: it carries the messages of ``core.coordinator.exchange`` between processes.

It runs in a child of rank 0's guard (runtime/processes/guard.py) and imports no torch. Each worker and each supervisor
holds one connection. A worker's death shows twice: its supervisor sees how the process ends, and its connection closes.
All that the worker said before is read first, since a number that it contributed to a finished step still counts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from recycle_plugin.authentication.door import Door
from recycle_plugin.authentication.handshake import Port
from recycle_plugin.authentication.secret import Secret
from recycle_plugin.core.coordinator.exchange import BACK_S, Exchange
from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.coordinator.mirror import STANDBY, Known
from recycle_plugin.core.coordinator.switchboard import OPERATOR, Switchboard
from recycle_plugin.core.messages.from_workers import Hello, SupervisorHeartbeat
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.deadlines import LATE_S, TICK_S
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.runtime.control.entrance import Entrance
from recycle_plugin.runtime.control.framed import Control
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.control.in_process import InProcess
from recycle_plugin.runtime.control.mirror import serve
from recycle_plugin.runtime.control.supervisor_heartbeat import HeartbeatListener
from recycle_plugin.runtime.system import clock
from recycle_plugin.runtime.system.host import host_name

LOOK_S, GONE = 1.0, 2  # s between looks at a checkpoint; looks in a row without it until it counts as removed
CLOSING_S = 5.0  # how long tasks may take to notice closed connections
# how long another end's host may be silent before the start: that end gives up sooner (connections.SILENT_S), and has
# come again by then if it can
EARLY_S = 60.0
HELLO_S = 60.0  # how long a new connection may take to say hello
# how long silence is normal; the failure detector (core/coordinator/facts/failure_detector.py) judges it
LISTEN_S = 60.0


class Coordinator(Exchange):
    """The coordinator's server for a job of ``ranks`` workers.

    ``say(event, now)`` gets every event. ``secret``: what each
    process that connects has to know. ``claim(job, job_id)`` claims the job's folders (claims.py) and returns why that
    fails, or "". ``known``: the state of a dead coordinator from which this one goes on.
    """

    def __init__(
        self,
        ranks: int,
        say: Callable[[Event, float], None],
        secret: Secret,
        claim: Callable[[JobSpec, str], str] = lambda job, job_id: "",
        known: Known | None = None,
    ) -> None:
        self._awake = clock.Awake(LATE_S)
        self._gone = asyncio.Event()
        self._over = asyncio.Event()
        self._serving: dict[asyncio.Task[Any], InLoop] = {}
        if known is None:  # several jobs may start in one second
            job_id = f"{time.strftime('recycle-%Y%m%d-%H%M%S')}-{os.getpid()}"
            board = Switchboard(ranks, job_id, clock.now(), host_name())
        else:
            board = known.board
            if board.over is not None:
                self._over.set()
        self._say, self._claim = say, claim
        self._door = Door(secret, Port.CONTROL, "at the coordinator", self._say_stranger)
        self._line_of: dict[Hello, int] = {}  # by the hello of supervisors whose datagrams count
        self._early = not board.membership.started  # whether nobody but the kernel notices a silent host
        super().__init__(board, known)
        self.deposed = asyncio.Event()  # once the others may go on without it
        self._alone_from = 0.0
        self._loop = asyncio.get_running_loop()
        self._entrance: Entrance | None = None
        self._heartbeats: HeartbeatListener | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[Any] | None = None

    # --- what it has for the exchange ----------------------------------------------------------------

    def _now(self) -> float:
        return self._seconds() + self._shift_s

    def _seconds(self) -> float:
        return self._awake.now()

    def _later(self, after_s: float, happen: Callable[[int], None], line: int) -> None:
        self._loop.call_later(after_s, happen, line)

    def _tell(self, event: Event, now: float) -> None:
        self._say(event, clock.now())  # not the state's time, which may be another host's

    def _claimed(self, job: JobSpec, job_id: str) -> str:
        return self._claim(job, job_id)

    def _refuses(self, control: Any, why: str) -> None:
        self._door.refuses((control and control.there) or ("this process", 0), why)

    def _expect_heartbeats(self, rank: int, line: int) -> None:
        control, its = self._told.get(line), self._board.lines.get(line)
        if self._heartbeats is not None and isinstance(control, InLoop) and its is not None:
            known = self._board.lines
            self._line_of = {hello: number for hello, number in self._line_of.items() if number in known}
            self._line_of[its.hello] = line
            self._heartbeats.expect(rank, its.hello, control.datagrams)

    def _is_over(self) -> bool:
        return self._over.is_set()

    def _ends(self, over: bool, gone: bool) -> None:
        if over:
            self._over.set()
        if gone:
            self._gone.set()

    def _deposed(self) -> bool:
        news = not self.deposed.is_set()
        self.deposed.set()
        return news

    # --- its life ------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> str:
        """The run folder once workers have named it, else where it would be."""
        return self._board.run_dir

    @property
    def address(self) -> tuple[str, int]:
        """The (host, port) where it listens, once started."""
        assert self._entrance is not None
        return self._entrance.address

    async def start(self, host: str, port: int, claimed: Callable[[], object] = lambda: None) -> None:
        """Listen for workers and supervisors at the address ``host``. Raises OSError if the port is taken. ``claimed``
        is called once the port is this job's, before any process can connect to it.
        """
        self._heartbeats = await HeartbeatListener.listen((host, port), self._take_datagram, self._refuse_datagram)
        try:
            self._entrance = Entrance(host, port, self._door, self._answer, self._warn)
            claimed()
            self._entrance.open()
        except BaseException:
            await self._close_ports()
            raise
        self._follows()
        self._begin()

    async def lead(self, entrance: Entrance, gone: str, gone_s: float) -> None:
        """Go on as a former standby at ``entrance``, to which others have turned. Host ``gone`` is probably dead: ends
        there may take ``gone_s`` seconds to come.
        """
        self._entrance = entrance
        try:
            self._heartbeats = await HeartbeatListener.listen(
                entrance.address, self._take_datagram, self._refuse_datagram
            )
        except OSError as error:
            self._warn(f"it can't receive heartbeats by datagram ({error.strerror})")
        entrance.answer = self._answer
        self._begin(gone, gone_s)

    def claim_anew(self) -> None:
        """Claim the folders that the dead coordinator had claimed."""
        board = self._board
        board.claimed = board.claimed and board.job is not None  # otherwise they are claimed when a worker names them
        if board.job is not None and board.claimed and (taken := self._claim(board.job, board.job_id)):
            self.fail(taken)

    def _begin(self, gone: str = "", gone_s: float = 0.0) -> None:
        self._alone_from = self._now() + (BACK_S if self._board.lines else 0.0)
        self._goes_on(gone, gone_s)
        self._tick()
        self._watching = asyncio.create_task(self._watch_checkpoints())

    async def _watch_checkpoints(self) -> None:
        """Check now and then whether checkpoints still exist: the job can't go on from a removed one."""
        looks: dict[str, int] = {}  # by path seen here: looks in a row without it
        while True:
            await asyncio.sleep(LOOK_S)
            for path in self.membership.checkpoints:
                there = await asyncio.to_thread(os.path.isdir, path)
                if there or path in looks:
                    looks[path] = 0 if there else looks[path] + 1
                if looks.get(path) == GONE:
                    self._take("removed", text=path)

    async def _close_ports(self) -> None:
        if self._entrance is not None:
            await self._entrance.close()
        if self._heartbeats is not None:
            self._heartbeats.close()

    def connect(self) -> InProcess:
        """Return a connection to the coordinator from within this process, for any thread."""
        return InProcess(lambda far: self._loop.call_soon_threadsafe(self._answer, far))

    def _warn(self, text: str) -> None:
        self._say(Event("warning", f"at the coordinator {text}"), clock.now())

    def _say_stranger(self, text: str, address: str) -> None:
        self._say(Event("stranger", text, {"address": address}), clock.now())

    @property
    def code(self) -> int:
        """The exit code with which the job has ended, 0 if it has not ended."""
        return self._board.over.code if self._board.over is not None else 0

    async def all_gone(self, goodbye_s: float) -> None:
        """Return once all reachable supervisors have gone, at most ``goodbye_s`` seconds after the job's end."""
        if not self._board.awaited:
            return
        gone, over = asyncio.create_task(self._gone.wait()), asyncio.create_task(self._over.wait())
        await asyncio.wait({gone, over}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({gone}, timeout=goodbye_s)
        gone.cancel()
        over.cancel()

    async def close(self) -> None:
        """Close every connection and wait for the tasks that serve them: if cancelled later, they would report it."""
        self._closing = True
        await self._close_ports()
        if self._ticking is not None:
            self._ticking.cancel()
        if self._watching is not None:
            self._watching.cancel()
        for control in self._serving.values():
            control.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=CLOSING_S)

    # --- connections -----------------------------------------------------------------------------

    def _answer(self, control: Control) -> None:
        if self._closing:
            control.close()
        else:
            self._begin_to_serve(InLoop(control))

    def answer(self, control: InLoop, hello: Hello) -> None:
        """Serve a connection whose ``hello`` came before this coordinator was there."""
        self._begin_to_serve(control, hello)

    def _begin_to_serve(self, control: InLoop, hello: Hello | None = None) -> None:
        if self._early:
            control.bear_silence(EARLY_S)
        self._serving[asyncio.create_task(self._serve(control, hello))] = control

    async def _serve(self, control: InLoop, hello: Hello | None) -> None:
        try:
            await self._converse(control, hello or await control.receive(HELLO_S))
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._serving.pop(task, None)
            control.close()

    async def _converse(self, control: InLoop, hello: object) -> None:
        if not isinstance(hello, Hello):
            self._complain(_who(control), control)
        elif hello.role == STANDBY:
            await serve(self.mirror, control, hello)
        elif (line := self._welcome(hello, control, _who(control))) is not None:
            if hello.role == OPERATOR:
                self._take("folder", line, text=os.path.abspath(self.run_dir))
            await self._hear(line, hello, control)

    async def _hear(self, line: int, hello: Hello, control: InLoop) -> None:
        while control.broken is None:
            await control.hear(partial(self._said, line), LISTEN_S)
            if hello.role == OPERATOR:
                break  # an operator's requests come soon after each other
        self._complain_of(hello, control)
        self._broken(line, control, control.broken is not None and control.broken.reset)

    def _complain_of(self, hello: Hello, control: InLoop) -> None:
        if hello.role == OPERATOR:
            self._complain("an operator", control)
        elif hello.role == "joining":
            self._complain(f"the supervisor that asks for a seat on host {hello.host}", control)
        else:
            self._complain(f"the {hello.role} of {named(hello.rank)}", control, rank=hello.rank)

    def _complain(self, who: str, control: InLoop, **details: object) -> None:
        """Tell the user if a connection has broken over bytes that are no message."""
        if control.broken is not None and control.broken.unreadable is not None:
            self._say(Event("warning", f"{who} has sent an unreadable message: {control.broken}", details), clock.now())

    def _refuse_datagram(self, sender: tuple[Any, ...], why: OSError | str) -> None:
        """Refuse a datagram, unless it may still be sealed for a coordinator that has died."""
        if self._now() > self._alone_from:
            self._door.refuses(sender, why)

    def _take_datagram(self, hello: Hello, heartbeat: SupervisorHeartbeat, sender: tuple[Any, ...]) -> None:
        if (line := self._line_of.get(hello)) is not None:
            self._take("beat", line, message=heartbeat)

    def _tick(self) -> None:
        if self._ticking is not None and self._loop.time() > self._ticking.when() + LATE_S:
            self._door.late()
        self._ticking = self._loop.call_later(TICK_S, self._tick)
        self._seconds()  # looked at also while nobody asks
        self._pass_time()
        if self._early and self.membership.started:
            self._leave_silence()

    def _leave_silence(self) -> None:
        """Bear any silence from the start on: the failure detector judges it. O(connections), once."""
        self._early = False
        for control in self._serving.values():
            control.bear_silence(0.0)


def _who(control: InLoop) -> str:
    return "a connection from {}".format("{}:{}".format(*control.there) if control.there else "this process")
