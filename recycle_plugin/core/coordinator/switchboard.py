"""The coordinator's switchboard: who speaks over each connection, what the state machine makes of it
(core/coordinator/membership.py), and over which connections its answers go.

It is a state machine too, without clock, threads or sockets, and holds all that the coordinator's process knows. A
process that takes in the same news in the same order (:data:`NEWS`) has the same state, and takes the place of one that
dies (core/coordinator/mirror.py). Connections then go on as they were, by what each end has kept
(core/messages/kept.py): nobody loses anything, and nothing is decided anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from hmac import compare_digest
from typing import Any, NamedTuple

from recycle_plugin.core.coordinator.facts.output import (
    LAST_STAGE,
    SUPERVISORS,
    WORKERS,
    CoordinatorOutput,
    Event,
    Joiner,
    SupervisorOf,
    Whom,
)
from recycle_plugin.core.coordinator.lines import Effects, Line
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.succession import Succession
from recycle_plugin.core.coordinator.words import Speakers
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import (
    Answer,
    Fence,
    ForkStandby,
    Generation,
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
    Post,
    Ready,
    StoreCall,
    SupervisorHeartbeat,
    Terminate,
    Vanishing,
)
from recycle_plugin.core.messages.generation_forms import GenerationForEach
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.kept import BEATS, EVERY, UNCOUNTED
from recycle_plugin.core.messages.mirroring import Got, Knows, StandsBy, Taken
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.describe import DYING, named
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.placement import spread
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId

LAST_WORDS_S = 0.2  # how long a dead worker's last messages may be under way
EXIT_S = 2.0  # how long a supervisor may take to report its worker's end before training has started
PLACING, WORKER, SUPERVISOR, JOINING, OPERATOR = "placing", "worker", "supervisor", "joining", "operator"
GOING_ON = (WORKER, SUPERVISOR, JOINING)  # roles that turn to the process that takes the coordinator's place
AT_ONCE = (Post, StoreCall, Left, Vanishing)  # long or last messages, acknowledged at once


class Switchboard:
    """The connections of the coordinator of a job of ``ranks`` workers, and its state.

    ``job_id``: the job's name. ``began``: when its first coordinator
    started, in seconds. ``host``: where that is. ``run_dir``: the run folder, once workers have named it. ``over``: the
    last message to supervisors, once the job is over.
    """

    def __init__(self, ranks: int, job_id: str, now: float, host: str = "") -> None:
        self.began = now
        self.membership = Membership(ranks)
        self.succession = Succession(host)
        self.run_dir = f"runs/{job_id}"  # until workers name another one
        self.over: Over | None = None
        self.claimed = False
        self.start: Event | None = None  # of the job's start
        self.job: JobSpec | None = None  # as its first worker reports it
        self._ranks = ranks
        self._welcome = Welcome(job_id, ranks=ranks)
        self.lines: dict[int, Line] = {}
        self._newest = 0
        self._placing: dict[int, int] = {}  # by place: the line of a supervisor that asks for a rank
        self._come: set[int] = set()  # ranks whose worker has connected once
        self._workers: dict[WorkerId, int] = {}
        self._supervisors: dict[int, int] = {}  # by rank
        self._speakers = Speakers()
        # line by (rank, host, process): supervisors whose rank was given away, and that wait for the job's end
        self._former: dict[tuple[int, str, int], int | None] = {}
        self._asked = 0  # how many supervisors have asked for a seat
        self._joiners: dict[int, int] = {}  # line by number: those without a seat
        self._exits: dict[WorkerId, Exited] = {}
        self._ended: set[int] = set()  # ranks whose supervisor has reported its worker's end
        self._deadlines = Deadlines()
        self._watched = -1
        self._generation: Generation | None = None  # the last that was sent
        self._hosts: dict[str, int] = {}  # the number by which workers hear of each
        self._due: list[tuple[float, str, WorkerId]] = []

    @property
    def job_id(self) -> str:
        return self._welcome.job_id

    # --- connections -----------------------------------------------------------------------------

    def opened(self, hello: Hello, who: str, now: float, effects: Effects) -> int:
        """Handle a new connection with the message ``hello``. ``who``: the other end's address in words. Return the
        connection's number. A process that has ``hello.token`` may resume the connection later.
        """
        number = self._newest = self._newest + 1
        self.lines[number] = line = Line(hello, hello.rank)
        if hello.role == OPERATOR:
            line.deaf = True
        elif hello.role == JOINING:
            self._attend_joiner(number, hello, now, effects)
        elif hello.role not in (PLACING, WORKER, SUPERVISOR) or not 0 <= hello.rank < self._ranks:
            effects.events.append(
                Event(
                    "warning",
                    f"{who} says that it is {hello.role[:20]} {hello.rank}, but this job "
                    f"has {self._ranks} ranks: it belongs to another job, or was started with another number of ranks",
                )
            )
            self._hang_up(number, effects)
        elif hello.role == WORKER:
            self._greet(number, hello, now, effects)
        elif hello.role == SUPERVISOR:
            self._attend_supervisor(number, hello, now, effects)
        else:
            self._place(number, hello, effects)
        return number

    def goes_on(self, hello: Hello, effects: Effects) -> bool:
        """Handle that a connection is made again, and send again what is missing. Return whether it is known."""
        line = self.known(hello)
        if line is None:
            return False
        line.kept.got(hello.heard)
        line.term = max(line.term, hello.term)
        self._greet_at(hello.line, effects)
        effects.frames += [(hello.line, frame) for frame in line.kept.since(hello.heard)]
        for rank, number in self._supervisors.items():
            if number == hello.line:
                effects.expected.append((rank, number))
        return True

    def known(self, hello: Hello) -> Line | None:
        """Return the connection with which ``hello`` goes on. None if there is none, if it is another's, or if its
        other end knows of a later term than is known here: then the others go on without this coordinator.
        """
        line = self.lines.get(hello.line)
        if line is None or not hello.token or not compare_digest(line.hello.token, hello.token):
            return None
        return line if hello.term <= self.succession.term else None

    def was_closed(self, hello: Hello) -> bool:
        """Return whether the connection with which ``hello`` would go on was closed here, in a term that its other end
        does not know to be over.
        """
        return 0 <= hello.line <= self._newest and hello.line not in self.lines and hello.term <= self.succession.term

    def closed(self, number: int, now: float, effects: Effects) -> None:
        """Handle that a connection is broken, or its other end has closed it."""
        line = self.lines.pop(number, None)
        if line is None:
            return
        effects.closed.append(number)
        if line.worker is not None and self._workers.get(line.worker) == number:
            del self._workers[line.worker]
        if line.worker is not None:
            self.membership.state.key_values.forget(line.worker)
            self._worker_closed(line.worker, now, effects)
        if line.hello.role == JOINING:
            for asked in [asked for asked, its in self._joiners.items() if its == number]:
                del self._joiners[asked]
                self.membership.joiner_gone(asked)
        if self._placing.get(line.rank) == number:
            del self._placing[line.rank]
        if self._supervisors.get(line.rank) == number:
            del self._supervisors[line.rank]
            self.act(self.membership.supervisor(line.rank, False, now), now, effects)
        if self._former.get(who := (line.rank, line.hello.host, line.hello.pid)) == number:
            self._former[who] = None

    def may_live(self, worker: WorkerId | None) -> bool:
        """Return whether this is a worker, and its supervisor has not reported the end of its process."""
        return worker is not None and worker not in self._exits

    def is_watched(self, number: int) -> bool:
        """Return whether a connection is that of a worker whose supervisor is here, and would report its end."""
        line = self.lines.get(number)
        its = None if line is None or line.worker is None else self._workers.get(line.worker)
        return line is not None and its == number and line.rank in self._supervisors

    def said(self, number: int, message: object, now: float, effects: Effects) -> None:
        """Handle a message from a connection; a message that another is to send changes nothing."""
        line = self.lines.get(number)
        if line is None:
            return
        if isinstance(message, Got):
            line.kept.got(message.count)
            return
        if isinstance(message, Knows):
            line.term = max(line.term, min(message.term, self.succession.term))
            return
        line.heard += 1
        if line.heard % (BEATS if line.hello.role == SUPERVISOR else EVERY) == 0 or isinstance(message, AT_ONCE):
            self._put(number, Got(line.heard), effects)
        if line.hello.role == OPERATOR:
            self._put(number, self._answer_to(message, now, effects), effects)
        elif not line.deaf:
            self._take_of(number, line, message, now, effects)

    def beat(self, number: int, message: SupervisorHeartbeat, now: float, effects: Effects) -> None:
        """Handle a supervisor's heartbeat that came outside its connection."""
        if (line := self.lines.get(number)) is not None and not line.deaf:
            self._take_of(number, line, message, now, effects)

    def _hang_up(self, number: int, effects: Effects) -> None:
        self.lines.pop(number, None)
        effects.closed.append(number)

    def _greet_at(self, number: int, effects: Effects) -> None:
        line, term = self.lines[number], self.succession.term
        incarnation = line.worker.incarnation if line.worker is not None else 0
        token = line.hello.token
        greeting = replace(self._welcome, incarnation=incarnation, line=number, heard=line.heard, token=token)
        self._put(number, greeting, effects)
        if term and line.term < term:
            self._put(number, self.term_told, effects)

    def _put(self, number: int, message: object, effects: Effects, frame: bytes = b"") -> None:
        frame = frame or encode(message)
        if not isinstance(message, UNCOUNTED):
            self.lines[number].kept.add(frame)
        effects.frames.append((number, frame))

    # --- who may take the coordinator's place -----------------------------------------------------

    @property
    def term_told(self) -> StandsBy:
        """The message that tells all others of the term."""
        return self.succession.told(self._deadlines)

    def stands_by(self, address: str, now: float, effects: Effects) -> None:
        """Begin a term, with a standby on another host at ``address`` ("host:port") or none (""). Tell all of it."""
        host, _, port = address.rpartition(":")
        self.succession.begin((host, int(port)) if address else None)
        self.membership.state.stood_by_elsewhere = bool(address)
        told = encode(self.term_told)
        effects.frames += [(number, told) for number, line in self.lines.items() if line.hello.role in GOING_ON]
        there = f"a standby on another host, at {address}, goes on"
        text = f"{there if address else 'no standby on another host: the job ends'} if host {self.succession.host} dies"
        effects.events.append(Event("standby", text, {"address": address, "term": self.succession.term}))

    def moves(self, host: str) -> None:
        """Handle that the standby on ``host`` is the coordinator now."""
        self.succession.moves(host)
        self.membership.state.stood_by_elsewhere = False

    def knowing(self, term: int) -> set[WorkerId]:
        """Return the workers that know of this term or a later term. O(connections)."""
        return {line.worker for line in self.lines.values() if line.worker is not None and line.term >= term}

    def _have_one_stand_by(self, now: float, effects: Effects) -> None:
        rank = self.succession.asks(self.membership.roster, now)
        if rank is not None and rank in self._supervisors:
            self._put(self._supervisors[rank], ForkStandby(rank), effects)

    # --- workers ---------------------------------------------------------------------------------

    def _greet(self, number: int, hello: Hello, now: float, effects: Effects) -> None:
        """Welcome a worker and give it its incarnation; its rank is from the launcher."""
        claimed = WorkerId(hello.rank, hello.incarnation)
        if (before := self._unanswered(claimed, hello)) is not None:
            self.lines[number].worker, self._workers[claimed] = claimed, number
            self._hang_up(before, effects)  # its end is no news
            self._greet_at(number, effects)
        else:
            self._greet_first(number, claimed, hello, now, effects)
        if self.membership.ended is not None:  # too late: the job has ended meanwhile
            self._put(number, self.membership.ended, effects)

    def _greet_first(self, number: int, claimed: WorkerId, hello: Hello, now: float, effects: Effects) -> None:
        worker = self.membership.identify(claimed)
        self.lines[number].worker = worker
        self._come.add(hello.rank)
        self._workers[worker] = number
        self._greet_at(number, effects)
        turned_away = self.membership.greet(worker, hello.host)
        if not turned_away.events:
            self._ended.discard(hello.rank)
            effects.events.append(
                Event(
                    "worker",
                    f"{named(hello.rank)} is process {hello.pid} on {hello.host}",
                    {"rank": hello.rank, "pid": hello.pid, "incarnation": worker.incarnation},
                )
            )
        self.act(turned_away, now, effects)

    def _unanswered(self, worker: WorkerId, hello: Hello) -> int | None:
        """Return an earlier connection of the same process that a dead coordinator left unanswered, or None."""
        number = self._workers.get(worker)
        if number is None or self.lines[number].heard:
            return None
        its = self.lines[number].hello
        return number if (its.pid, its.host) == (hello.pid, hello.host) else None

    def _worker_closed(self, worker: WorkerId, now: float, effects: Effects) -> None:
        exited = self._exits.pop(worker, None)
        if exited is not None:
            self._heard_of_end(exited, now, effects)
        elif self.membership.started:
            self.act(self.membership.connection_lost(worker, now), now, effects)
        else:  # nobody waits for it: its supervisor reports how it ended
            self._due.append((now + EXIT_S, "lose", worker))

    # --- supervisors -----------------------------------------------------------------------------

    def _attend_supervisor(self, number: int, hello: Hello, now: float, effects: Effects) -> None:
        """Attend to a supervisor. If it comes again it takes its own place, even if its going is not known yet."""
        self._greet_at(number, effects)
        if self.over is not None:
            self._put(number, self.over, effects)
        who = hello.rank, hello.host, hello.pid
        known = self._speakers.supervises(hello.rank, who[1:])
        self._speakers.starts(WorkerId(hello.rank))
        if who in self._former:
            self._former[who] = number
        elif known != who[1:]:
            # the launcher was started twice, and this one's worker is turned away: it knows nothing of the first one's,
            # and goes once it has read this
            self._put(number, Over(1), effects)
            self.lines[number].deaf = True
        else:
            effects.expected.append((hello.rank, number))  # datagrams of its earlier connections count too
            for rank, incarnation in self.membership.unreachable:
                if rank == hello.rank:  # the supervisor told to kill it may have gone before it could
                    fence = Fence(rank, "the others have gone on without it", incarnation=incarnation)
                    self._put(number, fence, effects)
            before, self._supervisors[hello.rank] = self._supervisors.get(hello.rank), number
            if before is not None:
                self._hang_up(before, effects)
            self.act(self.membership.supervisor(hello.rank, True, now), now, effects)

    def _attend_joiner(self, number: int, hello: Hello, now: float, effects: Effects) -> None:
        """Attend to a supervisor that asks for the seat of a lost worker."""
        self._asked += 1
        self._joiners[self._asked] = number
        self._greet_at(number, effects)
        if self.over is not None:
            self._put(number, Refused("the job is over"), effects)
        else:
            self.act(self.membership.join(self._asked, hello.host, hello.waits, now), now, effects)

    def _seat(self, asked: int, rank: int, effects: Effects) -> None:
        """Make a joining supervisor that of ``rank``. The former one stays: its launcher takes an early exit for a
        failure.
        """
        number = self._joiners.pop(asked)
        hello = self.lines[number].hello
        if (before := self._speakers.supervisor_of(rank)) is not None:
            self._former[rank, *before] = self._supervisors.get(rank)
        self._former.pop((rank, hello.host, hello.pid), None)
        self._speakers.seated(rank, (hello.host, hello.pid))
        self._supervisors[rank], self.lines[number].rank = number, rank
        effects.expected.append((rank, number))

    def _place(self, number: int, hello: Hello, effects: Effects) -> None:
        """Record a supervisor that asks for its worker's rank; tell all theirs once all hosts are known."""
        self._placing[hello.rank] = number
        if len(self._placing) == self._ranks:
            places = [self._placing[place] for place in range(self._ranks)]
            for rank, each in zip(spread([self.lines[each].hello.host for each in places]), places):
                self._put(each, Placed(rank), effects)

    def _answer_to(self, request: object, now: float, effects: Effects) -> Answer:
        if not isinstance(request, Ask):
            return Answer("the message is no request", False)
        said, output = self.membership.asked(request, now)
        self.act(output, now, effects)
        return said

    def folder_for(self, number: int, path: str, effects: Effects) -> None:
        """Tell an operator the run folder's absolute ``path``."""
        self._put(number, RunFolder(path if self.membership.started else ""), effects)

    # --- messages --------------------------------------------------------------------------------

    def _take_of(self, number: int, line: Line, message: object, now: float, effects: Effects) -> None:
        if self._speakers.may_say(line.hello, line.worker, message):
            self._take(message, now, effects)
        else:
            hello = line.hello
            why = f"the {hello.role} of {named(hello.rank)} sent what only another may send, {str(message)[:80]}"
            effects.refused.append((number, why))

    def _take(self, message: object, now: float, effects: Effects) -> None:
        if isinstance(message, Exited):
            self._ended.add(message.rank)
            for number in self._supervisors_of(message.rank):
                self._put(number, Lease(message.incarnation, 0.0), effects)
        if isinstance(message, Exited) and message.worker in self._workers:
            self._exits[message.worker] = message
            self._due.append((now + LAST_WORDS_S, "exit", message.worker))
            return
        if isinstance(message, SupervisorHeartbeat) and message.dying and self.membership.started:
            # its connection closes only once its memory is free; its last messages may be under way
            self._due.append((now + LAST_WORDS_S, "dying", message.worker))
        if isinstance(message, Ready) and not self.membership.started:
            self._deadlines = message.job.deadlines
            self.job = self.job or message.job
        self.act(self.membership.receive(message, now), now, effects)
        if isinstance(message, Left):
            self._workers.pop(message.worker, None)

    def claims(self, folder: str, why: str, now: float, effects: Effects) -> None:
        """Record that the job has claimed its run ``folder``, or end it because ``why`` it can't."""
        self.claimed = True
        if why:
            self.fail(why, now, effects)
        else:
            self.run_dir = folder

    def fail(self, text: str, now: float, effects: Effects) -> None:
        """End the job as failed for everybody; ``text`` is the line that all get."""
        self.act(self.membership.fail(text), now, effects)

    def terminate(self, reason: str, now: float, effects: Effects) -> None:
        """End the job at the next commit, as a supervisor that gets SIGTERM would; ``reason`` is for the user."""
        self.act(self.membership.receive(Terminate(0, reason), now), now, effects)

    def removed(self, path: str, now: float, effects: Effects) -> None:
        """Handle that the checkpoint at ``path`` was removed."""
        self.act(self.membership.removed(path), now, effects)

    def tick(self, now: float, effects: Effects) -> None:
        """Let time pass; to be called every ``core.vocabulary.deadlines.TICK_S``."""
        due = [each for each in self._due if each[0] <= now]
        self._due = [each for each in self._due if each[0] > now]
        for _, what, worker in due:
            if what == "lose":
                self.act(self.membership.connection_lost(worker, now), now, effects)
            elif what == "dying" and worker in self._workers:
                self.act(self.membership.connection_lost(worker, now, DYING), now, effects)
            elif what == "exit" and (exited := self._exits.pop(worker, None)) is not None:
                # its connection is as good as closed: a child of the script has inherited it
                self._heard_of_end(exited, now, effects)
            elif what == "regroup" and self.membership.regrouping == worker.incarnation:
                self.act(self.membership.regroup_overdue(self._deadlines.agreement_s), now, effects)
        self.act(self.membership.tick(now), now, effects)
        if self.membership.started and self.over is None:
            self._have_one_stand_by(now, effects)

    def _heard_of_end(self, exited: Exited, now: float, effects: Effects) -> None:
        effects.ended = True
        self.act(self.membership.receive(exited, now), now, effects)

    # --- what follows ----------------------------------------------------------------------------

    def act(self, output: CoordinatorOutput, now: float, effects: Effects) -> None:
        """Send the state machine's messages to their addressees; each message's frame is made once."""
        for whom, message in output.messages:
            self._send(whom, message, effects)
        effects.events += output.events
        if self.start is None:
            self.start = next((event for event in output.events if event.kind == "start"), None)
        number = self.membership.regrouping
        if number is not None and number != self._watched:
            self._watched = number
            self._due.append((now + self._deadlines.agreement_s, "regroup", WorkerId(-1, number)))

    def _send(self, whom: Whom, message: object, effects: Effects) -> None:
        if isinstance(message, Generation):
            self._send_generation(whom, message, effects)
            return
        frame = encode(message)
        for number in self._lines_of(whom):
            self._put(number, message, effects, frame)
        if isinstance(whom, Joiner) and isinstance(message, Seated):
            self._seat(whom.number, message.rank, effects)
        if isinstance(message, Restart):
            self._speakers.starts(message.worker)
        if isinstance(message, Over):
            self.over, effects.over = message, True

    def _send_generation(self, whom: Whom, generation: Generation, effects: Effects) -> None:
        """Send the changes since the last generation to connections that have it. To others, send the names of all
        members and the addresses of those near.
        """
        before, self._generation = self._generation, generation
        for member in generation.members:
            self._hosts.setdefault(member.host, len(self._hosts))
        told, roster = GenerationForEach(generation, self._hosts), generation.roster
        change = b""
        for number in self._lines_of(whom):
            line = self.lines[number]
            if before is not None and line.generation == before.number:
                change = frame = change or encode(told.changed(before))
            else:
                frame = encode(told.first(*self._place_of(line, roster)))
            line.generation = generation.number
            self._put(number, generation, effects, frame)

    def _place_of(self, line: Line, roster: Roster) -> tuple[Seat, int | None]:
        """Return the seat of the worker at ``line``, and its shard: None if it is no member of ``roster``."""
        assert line.worker is not None, "workers alone hear of generations"
        if (member := roster.member(line.worker)) is not None:
            return member.seat, member.shard
        seat = self.membership.state.attendance.seat_of(line.worker.rank)
        assert seat is not None, "every rank has a seat since the first generation"
        return seat, None

    def _lines_of(self, whom: Whom) -> Iterable[int]:
        if isinstance(whom, WorkerId):  # most messages are an answer
            return [self._workers[whom]] if whom in self._workers else []
        if whom == SUPERVISORS:
            return [*self._supervisors.values(), *(each for each in self._former.values() if each is not None)]
        if whom in (WORKERS, LAST_STAGE):  # messages for a lost worker that does not read would pile up
            return [number for worker, number in self._workers.items() if self.membership.is_of(whom, worker)]
        if isinstance(whom, SupervisorOf) and whom.former:
            return self._supervisors_of(whom.rank)
        if isinstance(whom, SupervisorOf):
            return [self._supervisors[whom.rank]] if whom.rank in self._supervisors else []
        if isinstance(whom, Joiner):
            return [self._joiners[whom.number]] if whom.number in self._joiners else []
        return []

    def _supervisors_of(self, rank: int) -> list[int]:
        """Return the connections of the rank's supervisor and of its former ones."""
        former = [number for who, number in self._former.items() if who[0] == rank and number is not None]
        return [*self._lines_of(SupervisorOf(rank)), *former]

    @property
    def awaited(self) -> set[int]:
        """The ranks whose supervisors have not said goodbye yet. A killed supervisor counts while its worker runs,
        since another takes its place. So does one whose worker's exit is still to be handled. A lost worker that can't
        be reached is awaited as long as the job may need another in its place.
        """
        killed = (self._speakers.ranks & self._come) - self._ended - self.membership.empty
        asked = {worker.rank for worker in self._exits}
        former = {who[0] for who, number in self._former.items() if number is not None}
        gone = {worker.rank for worker in self.membership.unreachable} if self.over is not None else set()
        return (self._supervisors.keys() | killed | asked | former) - gone


class News(NamedTuple):
    """News of a ``kind``, at ``now`` (s), on connection ``line``, with the other fields that this kind has."""

    kind: str
    now: float
    line: int = -1
    hello: Hello | None = None
    message: object = None
    text: str = ""

    @classmethod
    def of(cls, taken: Taken) -> News:
        """Return the news that another process has taken in."""
        message = decode(taken.message) if taken.message else None
        return cls(taken.kind, taken.now, taken.line, taken.hello, message, taken.text)

    def taken(self, out: int = 0, waits: bool = False) -> Taken:
        """Return the news for another process; see Taken."""
        message = b"" if self.message is None else encode(self.message)
        return Taken(self.kind, self.now, self.line, self.hello, message, self.text, out, waits)


NEWS: dict[str, Callable[[Switchboard, Any, Effects], Any]] = {
    "opened": lambda board, news, effects: board.opened(news.hello, news.text, news.now, effects),
    "goes on": lambda board, news, effects: board.goes_on(news.hello, effects),
    "closed": lambda board, news, effects: board.closed(news.line, news.now, effects),
    "said": lambda board, news, effects: board.said(news.line, news.message, news.now, effects),
    "beat": lambda board, news, effects: board.beat(news.line, news.message, news.now, effects),
    "folder": lambda board, news, effects: board.folder_for(news.line, news.text, effects),
    "claimed": lambda board, news, effects: board.claims(news.text, "", news.now, effects),
    "unclaimed": lambda board, news, effects: board.claims("", news.text, news.now, effects),
    "failed": lambda board, news, effects: board.fail(news.text, news.now, effects),
    "terminated": lambda board, news, effects: board.terminate(news.text, news.now, effects),
    "removed": lambda board, news, effects: board.removed(news.text, news.now, effects),
    "stands by": lambda board, news, effects: board.stands_by(news.text, news.now, effects),
    "tick": lambda board, news, effects: board.tick(news.now, effects),
}
"""How a switchboard handles each kind of news; returns what that kind returns."""
