"""The coordinator's server: it carries the messages of ``core.coordinator.switchboard`` between processes.

It lives in a process of rank 0's guard (runtime/processes/guard.py) and imports no torch.  Each worker and each
supervisor holds one connection.  A worker's death shows twice: its supervisor sees the process end and knows how, and
its connection closes.  What it said before it died is read to the end first, because a number that it contributed to a
finished step still counts.

All that is to be decided is the switchboard's.  Where another process stands by (runtime/control/mirror.py), that takes
in all that this one does, and nothing goes out before it has: so it can go on from there if this process dies.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recycle_plugin.authentication.door import Door
from recycle_plugin.authentication.handshake import Port
from recycle_plugin.authentication.secret import Secret
from recycle_plugin.core.coordinator.lines import Effects
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.output import Event
from recycle_plugin.core.coordinator.switchboard import NEWS, OPERATOR, WORKER, News, Switchboard
from recycle_plugin.core.messages.from_coordinator import Refused
from recycle_plugin.core.messages.from_workers import Hello, Ready, SupervisorHeartbeat
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.mirroring import Turns
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.runtime.control.entrance import Entrance
from recycle_plugin.runtime.control.framed import Control
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.control.in_process import InProcess
from recycle_plugin.runtime.control.mirror import STANDBY, Known, Mirror
from recycle_plugin.runtime.control.supervisor_heartbeat import HeartbeatListener
from recycle_plugin.runtime.system import clock

LOOK_S, GONE = 1.0, 2  # between two looks at the checkpoints; so many find none where one was removed
CLOSING_S = 5.0  # how long closed connections may take to be noticed
HELLO_S = 60.0  # how long who has connected may take to say who it is
# how long nothing need be heard of one that is there: silence is core.coordinator.failure_detector's business
LISTEN_S = 60.0
DEPOSED = (
    "not half of the last membership's workers can be reached, and who stood by on another host may go on with the "
    "others: the coordinator here ends, and with it whoever does not reach that one"
)
TOKEN = 16  # bytes of what a connection's other end has to know to go on with it
BACK_S = 60.0  # how long the other ends of connections may take to come to the one that goes on
GONE_S = 1.0  # the same for those on a host that has died, mostly


class Coordinator:
    """The coordinator's server for a job of ``ranks`` workers; ``say(event, now)`` gets every event.

    ``store_port`` is that of the job's key-value store; ``run_dir`` the run folder, once workers have said which;
    ``secret``: what whoever connects has to know; ``claim(job, job_id)``: claims the job's folders (claims.py),
    and returns why it can't have one, or "".  ``known``: what is known of a coordinator that has died, which this one
    goes on from.
    """

    def __init__(
        self,
        ranks: int,
        store_port: int,
        say: Callable[[Event, float], None],
        secret: Secret,
        claim: Callable[[JobSpec, str], str] = lambda job, job_id: "",
        known: Known | None = None,
    ) -> None:
        self._shift_s = self._last = 0.0
        self._gone = asyncio.Event()
        self._over = asyncio.Event()
        self._serving: dict[asyncio.Task[Any], InLoop] = {}
        if known is None:  # several jobs may start in one second
            job_id = f"{time.strftime('recycle-%Y%m%d-%H%M%S')}-{os.getpid()}"
            self._board = Switchboard(ranks, store_port, job_id, self._now(), socket.gethostname())
        else:
            self._board, self._last = known.board, known.now
            if known.board.over is not None:
                self._over.set()
        self._say, self._claim = say, claim
        self._door = Door(secret, Port.CONTROL, "at the coordinator", self._say_stranger)
        self._heard: dict[int, InLoop] = {}  # by line: what it is heard over
        self._away: set[int] = set()  # lines whose other ends break them, and come again
        self._told: dict[int, InLoop] = {}  # and what it is told over
        self._line_of: dict[Hello, int] = {}  # of supervisors whose datagrams count
        self.mirror = Mirror(self._board, self._release, self._begin_term, self._depose, self._over, known)
        self.deposed = asyncio.Event()  # the others may go on without it
        self._closing, self._alone_from = False, 0.0
        self._loop = asyncio.get_running_loop()
        self._entrance: Entrance | None = None
        self._heartbeats: HeartbeatListener | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[Any] | None = None

    def _now(self) -> float:
        return clock.now() + self._shift_s

    @property
    def membership(self) -> Membership:
        """The state machine that decides."""
        return self._board.membership

    @property
    def run_dir(self) -> str:
        """The run folder, once workers have said which; else where one would be."""
        return self._board.run_dir

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens, once it has started."""
        assert self._entrance is not None
        return self._entrance.address

    async def start(self, host: str, port: int, claimed: Callable[[], object] = lambda: None) -> None:
        """Listen for workers and supervisors at the address ``host``; raises OSError when the port is taken.

        ``claimed`` is called once the port is this job's, before anybody can connect to it.
        """
        self._heartbeats = await HeartbeatListener.listen((host, port), self._take_datagram, self._refuse_datagram)
        try:
            self._entrance = Entrance(host, port, self._door, self._answer, self._warn)
            claimed()
            self._entrance.open()
        except BaseException:
            await self._close_ports()
            raise
        if self._board.succession.term:  # whether enough knew of the last one is not known
            self.mirror.go_on_alone()
        self._begin()

    async def lead(self, entrance: Entrance, gone: str) -> None:
        """Go on at an ``entrance`` to which others have turned already (:meth:`answer`): this process stood by on
        another host than the one that is ``gone``, of which nobody may come.
        """
        self._entrance = entrance
        self._shift_s = self._last - self._now() if self._last else 0.0  # another host's clock goes on in this state
        try:
            self._heartbeats = await HeartbeatListener.listen(
                entrance.address, self._take_datagram, self._refuse_datagram
            )
        except OSError as error:
            self._warn(f"no heartbeats come by datagram ({error.strerror})")
        entrance.answer = self._answer
        self._begin(gone)

    def _begin(self, gone: str = "") -> None:
        self._alone_from = self._now() + (BACK_S if self._board.lines else 0.0)
        for number, line in self._board.lines.items():  # of a coordinator that has died
            back_s = GONE_S if gone and line.hello.host == gone else BACK_S
            self._loop.call_later(back_s, self._see_whether_back, number)
        self._tick()
        self._watching = asyncio.create_task(self._watch_checkpoints())

    async def _watch_checkpoints(self) -> None:
        """See now and then whether checkpoints are still there: what was removed is nothing to go on from."""
        looks: dict[str, int] = {}  # how many in a row have not found one that was there; on this host it may never be
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
        """A connection to the coordinator from within this process, for any thread."""
        return InProcess(lambda far: self._loop.call_soon_threadsafe(self._answer, far))

    def _warn(self, text: str) -> None:
        self._say(Event("warning", f"at the coordinator {text}"), self._now())

    def _say_stranger(self, text: str, address: str) -> None:
        self._say(Event("stranger", text, {"address": address}), self._now())

    @property
    def code(self) -> int:
        """The exit code that the job has ended with, 0 where it has not ended."""
        return self._board.over.code if self._board.over is not None else 0

    async def all_gone(self, goodbye_s: float) -> None:
        """Return when every supervisor that can be reached has closed its connection.

        It waits for ``goodbye_s`` seconds after the end of the job at the latest.
        """
        if not self._board.awaited:
            return
        gone, over = asyncio.create_task(self._gone.wait()), asyncio.create_task(self._over.wait())
        await asyncio.wait({gone, over}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({gone}, timeout=goodbye_s)
        gone.cancel()
        over.cancel()

    def fail(self, text: str) -> None:
        """End the job as failed for everybody; ``text`` is the line that all get."""
        self._take("failed", text=text)

    def terminate(self, reason: str) -> None:
        """End the job at the next commit, as a supervisor that gets SIGTERM would; ``reason`` is for the user."""
        self._take("terminated", text=reason)

    async def close(self) -> None:
        """Close every connection and wait for those that serve them: cancelled later, they would say so."""
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
        """Answer one who has said ``hello`` before this coordinator was there."""
        self._begin_to_serve(control, hello)

    def _begin_to_serve(self, control: InLoop, hello: Hello | None = None) -> None:
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
            await self.mirror.serve(control, hello)
        elif (line := self._welcome(hello, control)) is not None:
            await self._hear(line, hello, control)

    def _welcome(self, hello: Hello, control: InLoop) -> int | None:
        """The number of the connection with whoever says ``hello``; None for a worker that the others go on without."""
        if hello.line >= 0:
            if self._board.succession.term:  # what it may have to wait for is that enough know of the term
                control.send(self._board.term_told)
            news = News("goes on", self._now(), hello=hello)
            there, effects = self._taken(news)
            if there:
                self._attach(hello.line, control, effects)
                return hello.line
            if hello.role == WORKER:
                control.send(Refused("the others have gone on without it"))
                return None
        hello = replace(hello, line=-1, token=secrets.token_hex(TOKEN))
        opened, effects = self._taken(News("opened", self._now(), hello=hello, text=_who(control)))
        line = int(opened)
        self._attach(line, control, effects)
        if hello.role == OPERATOR:
            self._take("folder", line, text=os.path.abspath(self.run_dir))
        return line

    def _attach(self, line: int, control: InLoop, effects: Effects) -> None:
        before, self._heard[line] = self._heard.get(line), control
        if before is not None:
            before.close()

        def attach() -> None:
            self._told[line] = control

        self.mirror.then(effects, attach)

    async def _hear(self, line: int, hello: Hello, control: InLoop) -> None:
        """Take all messages until the connection is broken."""
        while (message := await control.receive(LISTEN_S)) is not None or control.broken is None:
            if message is None:
                if hello.role == OPERATOR:
                    break  # whose requests come soon, one after another
                continue
            self._said(line, message)
        self._complain_of(hello, control)
        if self._heard.get(line) is control:
            del self._heard[line]
            if line in self._away:
                self._away.remove(line)
                self._loop.call_later(BACK_S, self._see_whether_back, line)
            else:
                self._take("closed", line)

    def _said(self, line: int, message: object) -> None:
        if isinstance(message, Turns):
            self._away.add(line)
            return
        if isinstance(message, Ready) and not self.membership.started and not self._board.claimed:
            why = self._claim(message.job, self._board.job_id)
            self._take("unclaimed" if why else "claimed", text=why or message.job.run_dir)
        self._take("said", line, message=message)

    def _see_whether_back(self, line: int) -> None:
        """Take a connection for broken whose other end has not come, since the one before has died."""
        if not self._closing and line not in self._heard:
            self._take("closed", line)

    def _complain_of(self, hello: Hello, control: InLoop) -> None:
        if hello.role == OPERATOR:
            self._complain("an operator", control)
        elif hello.role == "joining":
            self._complain(f"the supervisor that asks for a seat on host {hello.host}", control)
        else:
            self._complain(f"the {hello.role} of {named(hello.rank)}", control, rank=hello.rank)

    def _complain(self, who: str, control: InLoop, **details: object) -> None:
        """Tell the user of a connection that speaks nonsense, and so is as good as closed."""
        if control.broken is not None and control.broken.unreadable is not None:
            self._say(Event("warning", f"{who} says what can't be understood: {control.broken}", details), self._now())

    def _refuse_datagram(self, sender: tuple[Any, ...], why: OSError | str) -> None:
        """Refuse a datagram; none of those that are still sealed for a coordinator that has died."""
        if self._now() > self._alone_from:
            self._door.refuses(sender, why)

    def _take_datagram(self, hello: Hello, heartbeat: SupervisorHeartbeat, sender: tuple[Any, ...]) -> None:
        if (line := self._line_of.get(hello)) is not None:
            self._take("beat", line, message=heartbeat)

    def _begin_term(self, address: str) -> None:
        """Tell all of a term that begins, at once where nobody stands by elsewhere in it."""
        if self._closing or self._over.is_set():
            return
        effects = self._taken(News("stands by", self._now(), text=address))[1]
        self.mirror.then(effects) if address else self._release(effects)

    def _depose(self) -> None:
        if not self.deposed.is_set():
            said = {"term": self._board.succession.term, "host": self._board.succession.host}
            self._say(Event("deposed", DEPOSED, said), self._now())
        self.deposed.set()

    # --- news ------------------------------------------------------------------------------------

    def _take(self, kind: str, line: int = -1, message: object = None, text: str = "") -> None:
        if not self._closing:
            self.mirror.then(self._taken(News(kind, self._now(), line, None, message, text))[1])

    def _taken(self, news: News) -> tuple[Any, Effects]:
        """What the switchboard answers to ``news``, and what follows from them, once whoever stands by has them too."""
        effects = Effects()
        try:
            answer = NEWS[news.kind](self._board, news, effects)
        except Exception as error:
            if news.kind != "failed":
                self.fail(f"the coordinator met an error of its own ({error!r})")
            raise
        effects.ended = effects.ended or news.kind == "closed"
        self.mirror.take(news, effects)
        return answer, effects

    def _release(self, effects: Effects) -> None:
        """Let others see what has followed."""
        now = self._now()
        for line, frame in effects.frames:
            if (control := self._told.get(line)) is not None:
                control.send(frame)
        for event in effects.events:
            self._say(event, now)
        for line, why in effects.refused:
            control = self._told.get(line)
            self._door.refuses((control and control.there) or ("this process", 0), why)
        for rank, line in effects.expected:
            self._expect_heartbeats(rank, line)
        for line in effects.closed:
            self._heard.pop(line, None)
            if (control := self._told.pop(line, None)) is not None:
                control.close()
        if effects.over:
            self._over.set()
        if (effects.ended or self._board.over is not None) and not self._board.awaited:
            self._gone.set()

    def _expect_heartbeats(self, rank: int, line: int) -> None:
        control, its = self._told.get(line), self._board.lines.get(line)
        if self._heartbeats is not None and control is not None and its is not None:
            self._line_of[its.hello] = line
            self._heartbeats.expect(rank, its.hello, control.datagrams)

    def _tick(self) -> None:
        self._ticking = self._loop.call_later(TICK_S, self._tick)
        self.mirror.see_late()
        if not self.mirror.holds_up:
            self._take("tick")


def _who(control: InLoop) -> str:
    return "a connection from {}".format("{}:{}".format(*control.there) if control.there else "this process")
