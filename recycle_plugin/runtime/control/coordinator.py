"""The coordinator's server: it carries the messages of ``core.coordinator.membership`` between processes.

It lives in a process of rank 0's guard (runtime/processes/guard.py) and imports no torch.  Each worker and each
supervisor holds one connection.  A worker's death shows twice: its supervisor sees the process end and knows how, and
its connection closes.  What it said before it died is read to the end first, because a number that it contributed to a
finished step still counts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recycle_plugin.authentication.door import Door
from recycle_plugin.authentication.handshake import Port
from recycle_plugin.authentication.secret import Secret
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.output import (
    SUPERVISORS,
    WORKERS,
    CoordinatorOutput,
    Event,
    Joiner,
    SupervisorOf,
    Whom,
)
from recycle_plugin.core.coordinator.words import Speakers
from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_coordinator import (
    Answer,
    Fence,
    Lease,
    Over,
    Placed,
    Refused,
    Restart,
    RunFolder,
    Seated,
    Welcome,
)
from recycle_plugin.core.messages.from_operators import Ask
from recycle_plugin.core.messages.from_workers import (
    Exited,
    Hello,
    Left,
    Ready,
    SupervisorHeartbeat,
    Terminate,
)
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.deadlines import TICK_S, Deadlines
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.core.vocabulary.placement import spread
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.runtime.control.connections import Control, InProcess
from recycle_plugin.runtime.control.entrance import Entrance
from recycle_plugin.runtime.control.in_loop import InLoop
from recycle_plugin.runtime.control.supervisor_heartbeat import HeartbeatListener
from recycle_plugin.runtime.system import clock

LAST_WORDS_S = 0.2  # how long what a dead worker has said may be under way
EXIT_S = 2.0  # how long a supervisor may take to say how its worker ended, before training has started
LOOK_S, GONE = 1.0, 2  # between two looks at the checkpoints; so many find none where one was removed
CLOSING_S = 5.0  # how long closed connections may take to be noticed
HELLO_S = 60.0  # how long who has connected may take to say who it is
# how long nothing need be heard of one that is there: silence is core.coordinator.failure_detector's business
LISTEN_S = 60.0


class Coordinator:
    """The coordinator's server for a job of ``ranks`` workers; ``say(event, now)`` gets every event.

    ``store_port`` is that of the job's key-value store; ``run_dir`` the run folder, once workers have said which;
    ``secret``: what whoever connects has to know; ``claim(job, job_id)``: claims the job's folders (claims.py),
    and returns why it can't have one, or "".
    """

    def __init__(
        self,
        ranks: int,
        store_port: int,
        say: Callable[[Event, float], None],
        secret: Secret,
        claim: Callable[[JobSpec, str], str] = lambda job, job_id: "",
    ) -> None:
        self._gone = asyncio.Event()
        self._over = asyncio.Event()
        self._last_word: Over | None = None
        self._serving: dict[asyncio.Task[Any], InLoop] = {}
        self.membership = Membership(ranks)
        self._ranks = ranks
        self._placing: dict[int, tuple[str, InLoop]] = {}  # by place: the host of a supervisor that asks for its rank
        # several jobs may start in one second
        self._welcome = Welcome(store_port, f"{time.strftime('recycle-%Y%m%d-%H%M%S')}-{os.getpid()}", ranks=ranks)
        self._say, self._claim = say, claim
        self._claimed = False
        self._door = Door(secret, Port.CONTROL, "at the coordinator", self._say_stranger)
        self._come: set[int] = set()  # ranks of which a worker has
        self._workers: dict[WorkerId, InLoop] = {}
        self._supervisors: dict[int, InLoop] = {}  # by rank
        # by rank: host and process of the supervisor that its worker is started by
        self._supervised: dict[int, tuple[str, int]] = {}
        self._speakers = Speakers(self._supervised)
        # by rank, host and process: supervisors whose rank was given away, and that wait for the job's end
        self._former: dict[tuple[int, str, int], InLoop | None] = {}
        self._asked = 0  # supervisors that have asked for a seat
        self._joiners: dict[int, tuple[Hello, InLoop]] = {}  # by their numbers: those that have none
        self._exits: dict[WorkerId, Exited] = {}
        self._ended: set[int] = set()  # ranks whose supervisor has said that its worker is no more
        self._agreement_s = Deadlines().agreement_s
        self.run_dir = f"runs/{self._welcome.job_id}"  # unless workers say another one
        self._watched = -1
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._entrance: Entrance | None = None
        self._heartbeats: HeartbeatListener | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[Any] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens, once it has started."""
        assert self._entrance is not None
        return self._entrance.address

    async def start(self, host: str, port: int, claimed: Callable[[], object] = lambda: None) -> None:
        """Listen for workers and supervisors at the address ``host``; raises OSError when the port is taken.

        ``claimed`` is called once the port is this job's, before anybody can connect to it.
        """
        self._heartbeats = await HeartbeatListener.listen((host, port), self._take_datagram, self._door.refuses)
        try:
            self._entrance = Entrance(host, port, self._door, self._answer, self._warn)
            claimed()
            self._entrance.open()
        except BaseException:
            await self._close_ports()
            raise
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
                    self._act(self.membership.removed(path))

    async def _close_ports(self) -> None:
        if self._entrance is not None:
            await self._entrance.close()
        if self._heartbeats is not None:
            self._heartbeats.close()

    def connect(self) -> InProcess:
        """A connection to the coordinator from within this process, for any thread."""
        return InProcess(lambda far: self._loop.call_soon_threadsafe(self._answer, far))

    def _warn(self, text: str) -> None:
        self._say(Event("warning", f"at the coordinator {text}"), clock.now())

    def _say_stranger(self, text: str, address: str) -> None:
        self._say(Event("stranger", text, {"address": address}), clock.now())

    @property
    def code(self) -> int:
        """The exit code that the job has ended with, 0 where it has not ended."""
        return self._last_word.code if self._last_word is not None else 0

    async def all_gone(self, goodbye_s: float) -> None:
        """Return when every supervisor that can be reached has closed its connection.

        It waits for ``goodbye_s`` seconds after the end of the job at the latest.
        """
        if not self._awaited:
            return
        gone, over = asyncio.create_task(self._gone.wait()), asyncio.create_task(self._over.wait())
        await asyncio.wait({gone, over}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({gone}, timeout=goodbye_s)
        gone.cancel()
        over.cancel()

    def fail(self, text: str) -> None:
        """End the job as failed for everybody; ``text`` is the line that all get."""
        self._act(self.membership.fail(text))

    def terminate(self, reason: str) -> None:
        """End the job at the next commit, as a supervisor that gets SIGTERM would; ``reason`` is for the user."""
        self._act(self.membership.receive(Terminate(0, reason), clock.now()))

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

    def _answer(self, control: Control) -> None:
        if self._closing:
            control.close()
        else:
            served = InLoop(control)
            self._serving[asyncio.create_task(self._serve(served))] = served

    async def _serve(self, control: InLoop) -> None:
        try:
            await self._converse(control)
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._serving.pop(task, None)
            control.close()

    async def _converse(self, control: InLoop) -> None:
        hello = await control.receive(HELLO_S)
        roles = {"placing": self._placed, "worker": self._attend_worker, "supervisor": self._attend_supervisor}
        joins = isinstance(hello, Hello) and hello.role == "joining"
        who = "a connection from {}".format("{}:{}".format(*control.there) if control.there else "this process")
        if not isinstance(hello, Hello):
            self._complain(who, control)
        elif joins:
            await self._attend_joiner(hello, control)
        elif hello.role == "operator":
            await self._attend_operator(who, control)
        elif hello.role not in roles or not 0 <= hello.rank < self._ranks:
            text = (
                f"{who} says that it is {hello.role[:20]} {hello.rank}, and this job has {self._ranks} ranks: "
                "it is another job's, or was started for another one"
            )
            self._say(Event("warning", text), clock.now())
        else:
            await roles[hello.role](hello, control)

    async def _attend_worker(self, hello: Hello, control: InLoop) -> None:
        worker = self._greet(hello, control)
        if self.membership.ended is not None:  # it comes too late: the job has ended meanwhile
            control.send(self.membership.ended)
        await self._hear(hello, control, worker)
        self._workers.pop(worker, None)
        self._worker_closed(worker)

    async def _attend_supervisor(self, hello: Hello, control: InLoop) -> None:
        """Serve a supervisor; one that comes again takes its own place, also where it is not known yet that it has
        gone.
        """
        control.send(self._welcome)
        if self._last_word is not None:
            control.send(self._last_word)
        who = hello.rank, hello.host, hello.pid
        known = self._supervised.setdefault(hello.rank, who[1:])
        self._speakers.starts(WorkerId(hello.rank))
        if who in self._former:
            await self._keep_former(who, hello, control)
        elif known != who[1:]:
            # of a launcher that was started twice, whose worker is turned away: it knows nothing of the first one's
            control.send(Over(1))
            while await control.receive(LISTEN_S) is not None or control.broken is None:
                pass  # it goes once it has read that
        else:
            self._expect_heartbeats(hello.rank, hello, control)
            for rank, incarnation in self.membership.unreachable:
                if rank == hello.rank:  # who was to see to it may have gone before it could
                    control.send(Fence(rank, "the others have gone on without it", incarnation=incarnation))
            before, self._supervisors[hello.rank] = self._supervisors.get(hello.rank), control
            if before is not None:
                before.close()
            self._act(self.membership.supervisor(hello.rank, True, clock.now()))
            await self._hear(hello, control)
            self._supervisor_closed(control)

    def _expect_heartbeats(self, rank: int, hello: Hello, control: InLoop) -> None:
        """Let the supervisor's datagrams count, those of its connections before too."""
        if self._heartbeats is not None:
            self._heartbeats.expect(rank, hello, control.datagrams)

    def _supervisor_closed(self, control: InLoop) -> None:
        for rank in [rank for rank, its in self._supervisors.items() if its is control]:
            del self._supervisors[rank]
            self._act(self.membership.supervisor(rank, False, clock.now()))
        self._former = {who: None if its is control else its for who, its in self._former.items()}
        self._see_who_is_gone()

    # --- operators -------------------------------------------------------------------------------

    async def _attend_operator(self, who: str, control: InLoop) -> None:
        """Answer an operator's requests, which come one after another, each soon."""
        control.send(RunFolder(os.path.abspath(self.run_dir) if self.membership.started else ""))
        while (request := await control.receive(HELLO_S)) is not None:
            control.send(self._answer_to(request))
        self._complain(who, control)

    def _answer_to(self, request: object) -> Answer:
        if not isinstance(request, Ask):
            return Answer("that is no request", False)
        said, output = self.membership.asked(request, clock.now())
        self._act(output)
        return said

    # --- who comes from elsewhere ----------------------------------------------------------------

    async def _attend_joiner(self, hello: Hello, control: InLoop) -> None:
        """Serve a supervisor that asks for the seat of a lost worker, before it has one and after that."""
        self._asked += 1
        number = self._asked
        self._joiners[number] = hello, control
        control.send(self._welcome)
        if self._last_word is not None:
            control.send(Refused("the job is over"))
        else:
            self._act(self.membership.join(number, hello.host, hello.waits, clock.now()))
        await self._hear(hello, control)
        if self._joiners.pop(number, None) is not None:
            self.membership.joiner_gone(number)
        self._supervisor_closed(control)

    def _seat(self, number: int, rank: int) -> None:
        """Make a supervisor that has asked for a seat the one of ``rank``.

        The one before waits for the job's end: its launcher would take its own for a failure.
        """
        hello, control = self._joiners.pop(number)
        if rank in self._supervised:
            self._former[rank, *self._supervised[rank]] = self._supervisors.get(rank)
        self._former.pop((rank, hello.host, hello.pid), None)
        self._supervised[rank] = hello.host, hello.pid
        self._supervisors[rank] = control
        self._expect_heartbeats(rank, hello, control)

    async def _keep_former(self, who: tuple[int, str, int], hello: Hello, control: InLoop) -> None:
        self._former[who] = control
        await self._hear(hello, control)
        self._supervisor_closed(control)

    def _greet(self, hello: Hello, control: InLoop) -> WorkerId:
        """Welcome a worker, and give it its incarnation; its rank is from the launcher."""
        worker = self.membership.identify(WorkerId(hello.rank, hello.incarnation))
        self._come.add(hello.rank)
        self._workers[worker] = control
        control.send(replace(self._welcome, incarnation=worker.incarnation))
        turned_away = self.membership.greet(worker, hello.host)
        if not turned_away.events:
            self._ended.discard(hello.rank)
            self._say(
                Event(
                    "worker",
                    f"{named(hello.rank)} is process {hello.pid} on {hello.host}",
                    {"rank": hello.rank, "pid": hello.pid, "incarnation": worker.incarnation},
                ),
                clock.now(),
            )
        self._act(turned_away)
        return worker

    async def _hear(self, hello: Hello, control: InLoop, worker: WorkerId | None = None) -> None:
        """Take all messages until the connection is broken, but those that are another's to say; from ``worker``, or
        from a supervisor.
        """
        try:
            while (message := await control.receive(LISTEN_S)) is not None or control.broken is None:
                if message is None:
                    continue
                self._take_of(hello, worker, message, control.there or ("this process", 0))
        except Exception as error:
            self.fail(f"the coordinator met an error of its own ({error!r})")
            raise
        if hello.role == "joining":
            self._complain(f"the supervisor that asks for a seat on host {hello.host}", control)
        else:
            self._complain(f"the {hello.role} of {named(hello.rank)}", control, rank=hello.rank)

    def _complain(self, who: str, control: InLoop, **details: object) -> None:
        """Tell the user of a connection that speaks nonsense, and so is as good as closed."""
        if control.broken is not None and control.broken.unreadable is not None:
            self._say(Event("warning", f"{who} says what can't be understood: {control.broken}", details), clock.now())

    async def _placed(self, hello: Hello, control: InLoop) -> None:
        self._place(hello, control)
        await control.receive(LISTEN_S)  # until it has its answer, and goes

    def _place(self, hello: Hello, control: InLoop) -> None:
        """Give each supervisor the rank of its worker, once the hosts of all are known."""
        self._placing[hello.rank] = hello.host, control
        if len(self._placing) == self._ranks:
            places = [self._placing[place] for place in range(self._ranks)]
            for rank, (_, each) in zip(spread([host for host, _ in places]), places):
                each.send(Placed(rank))

    def _take_of(self, hello: Hello, worker: WorkerId | None, message: object, sender: tuple[Any, ...]) -> None:
        """Take a message that has come from ``sender``, host and port, if it is its own to say."""
        if self._speakers.may_say(hello, worker, message):
            self._take(message)
        else:
            why = f"the {hello.role} of {named(hello.rank)} says what is another's to say, {str(message)[:80]}"
            self._door.refuses(sender, why)

    def _take_datagram(self, hello: Hello, heartbeat: SupervisorHeartbeat, sender: tuple[Any, ...]) -> None:
        self._take_of(hello, None, heartbeat, sender)

    def _take(self, message: object) -> None:
        if isinstance(message, Exited):
            self._ended.add(message.rank)
        if isinstance(message, Exited):
            for control in self._supervisors_of(message.rank):
                control.send(Lease(message.incarnation, 0.0))
        if isinstance(message, Exited) and message.worker in self._workers:
            self._exits[message.worker] = message
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._closed_by_exit, message.worker)
            return
        if isinstance(message, Ready) and not self.membership.started:
            self._begin(message.job)
        self._act(self.membership.receive(message, clock.now()))
        if isinstance(message, Left):
            self._workers.pop(message.worker, None)

    def _begin(self, job: JobSpec) -> None:
        """Take in what the job is, which its first worker says."""
        self._agreement_s = job.deadlines.agreement_s
        if self._claimed:
            return
        self._claimed = True
        if why := self._claim(job, self._welcome.job_id):
            self.fail(why)
        else:
            self.run_dir = job.run_dir

    @property
    def _awaited(self) -> set[int]:
        """Ranks whose supervisors are still to say goodbye: also one that was killed, whose worker runs, since another
        takes its place; and those of which it is still to be found out whether the worker has left or was lost.  A lost
        worker that can't be reached is awaited for as long as the job may need another in its place.
        """
        killed = (self._supervised.keys() & self._come) - self._ended - self.membership.empty
        asked = {worker.rank for worker in self._exits}
        former = {who[0] for who, control in self._former.items() if control is not None}
        gone = {worker.rank for worker in self.membership.unreachable} if self._over.is_set() else set()
        return (self._supervisors.keys() | killed | asked | former) - gone

    def _see_who_is_gone(self) -> None:
        if not self._closing and not self._awaited:
            self._gone.set()

    def _worker_closed(self, worker: WorkerId) -> None:
        if self._closing:
            return  # it was this side that closed
        exited = self._exits.pop(worker, None)
        if exited is not None:
            self._act(self.membership.receive(exited, clock.now()))
        elif self.membership.started:
            self._lose(worker)
        else:  # nobody waits for it: how it ended, its supervisor says
            self._loop.call_later(EXIT_S, self._lose, worker)
        self._see_who_is_gone()

    def _lose(self, worker: WorkerId) -> None:
        if not self._closing:
            self._act(self.membership.connection_lost(worker, clock.now()))

    def _closed_by_exit(self, worker: WorkerId) -> None:
        """Take a worker's connection for closed after its exit: some child of the script has inherited it."""
        exited = self._exits.pop(worker, None)
        if exited is not None:
            self._act(self.membership.receive(exited, clock.now()))
        self._see_who_is_gone()

    def _act(self, output: CoordinatorOutput) -> None:
        now = clock.now()
        for whom, message in output.messages:
            self._send(whom, message)
        for event in output.events:
            self._say(event, now)
        self._watch_regrouping()

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._act(self.membership.tick(clock.now()))

    def _send(self, whom: Whom, message: object) -> None:
        """Send a message; for all, its frame is made once, and each of them costs one system call, 2 to 3 µs here."""
        frame = encode(message)
        for control in self._controls(whom):
            control.send(frame)
        if isinstance(whom, Joiner) and isinstance(message, Seated):
            self._seat(whom.number, message.rank)
        if isinstance(message, Restart):
            self._speakers.starts(message.worker)
        if isinstance(message, Over):
            self._last_word = message
            self._over.set()
            self._see_who_is_gone()

    def _controls(self, whom: Whom) -> list[InLoop]:
        if whom == SUPERVISORS:
            return [*self._supervisors.values(), *filter(None, self._former.values())]
        if whom == WORKERS:  # what is for a lost one that does not read would pile up here
            return [control for worker, control in self._workers.items() if not self.membership.is_apart(worker)]
        if isinstance(whom, SupervisorOf) and whom.former:
            return self._supervisors_of(whom.rank)
        if isinstance(whom, SupervisorOf):
            return [self._supervisors[whom.rank]] if whom.rank in self._supervisors else []
        if isinstance(whom, Joiner):
            return [self._joiners[whom.number][1]] if whom.number in self._joiners else []
        return [self._workers[whom]] if isinstance(whom, WorkerId) and whom in self._workers else []

    def _supervisors_of(self, rank: int) -> list[InLoop]:
        """Of the rank's supervisor, and of those that were so once."""
        former = [control for who, control in self._former.items() if who[0] == rank and control is not None]
        return [*self._controls(SupervisorOf(rank)), *former]

    def _watch_regrouping(self) -> None:
        number = self.membership.regrouping
        if number is not None and number != self._watched:
            self._watched = number
            asyncio.get_running_loop().call_later(self._agreement_s, self._regroup_overdue, number)

    def _regroup_overdue(self, number: int) -> None:
        if self.membership.regrouping == number:
            self._act(self.membership.regroup_overdue(self._agreement_s))
