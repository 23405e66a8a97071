"""A standby takes in all that the coordinator does, and goes on from there if that dies.

The coordinator sends its whole state once, then everything that it takes in. Once the standby has caught up both are
*in step*: nothing that follows from news goes out before the standby has the news. So the standby knows whatever
anybody in the job has heard.

A standby that takes nothing for a while is let go, and nobody waits for it any more. But first it must not be able to
take the coordinator's place. On the coordinator's own host their guard decides about that, and hears so first
(``changes``). For one on another host enough workers have to know (core/coordinator/succession.py).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.coordinator.lines import Effects
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.coordinator.succession import Electorate
from recycle_plugin.core.coordinator.switchboard import NEWS, WORKER, News, Switchboard
from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_coordinator import Refused
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.mirroring import Got, SentBack, Snapshot, Taken
from recycle_plugin.core.vocabulary.roster import WorkerId

STANDBY = "standby"  # the role of its connection
PIECE = 1 << 20  # bytes of the state in one message
LATE_S = 2.0  # how long a standby may take to take news in
STEP_S = 30.0  # how long a standby may take until it is in step
HELD_S = 0.5  # more than the usual time of a standby to take news in
TURNED_S = 5.0  # how long a standby counts an end while the coordinator goes on: others may turn later
GONE_S = 1.0  # how long ends on the host of a coordinator that was left may take to turn, too: all saw it end at once
LATER_S = 4.0  # the same if the coordinator only hangs: the ends' leases are over at different times
AGREE_S = 10.0  # how long enough workers may take to confirm a term


class Port(Protocol):
    """The coordinator's needs of a connection, however it is made."""

    def send(self, message: object, more: bool = False) -> object:
        """Send a message, or its frame. ``more``: send it with the next message, or at :meth:`flush_soon`."""

    def flush_soon(self) -> None:
        """Send the messages held back by ``more``."""

    def close(self) -> None:
        """Close the connection."""


End = TypeVar("End", bound=Port)


@dataclass
class Follower:
    """A standby, known ``since`` then. ``taken``: how many news it has. ``address``: where it listens, if on another
    host. Once it has the first ``mark`` news it is ``near``; then it is ``awaited`` before anything goes out, then
    ``in_step``.
    """

    control: Port
    pid: int
    address: str
    taken: int
    since: float
    mark: int
    near: bool = False
    awaited: bool = False
    in_step: bool = False


class Mirror:
    """What the coordinator knows of its standbys.

    * ``release`` sends out what has followed from news.
    * ``begin(address)`` begins the next term, with a standby on another host, or none.
    * ``depose`` is called when the others may go on without this coordinator, unless it ``is_over`` and all were told.
    * ``clock()`` returns the seconds since some moment.
    * ``known``: the knowledge of another coordinator whose place this one has taken.
    """

    def __init__(
        self,
        board: Switchboard,
        release: Callable[[Effects], None],
        begin: Callable[[str], None],
        depose: Callable[[], object],
        is_over: Callable[[], bool],
        clock: Callable[[], float],
        known: Known | None = None,
    ) -> None:
        self._board, self._release, self._begin, self._depose = board, release, begin, depose
        self._is_over, self._clock = is_over, clock
        self._changes: Callable[[int], object] = lambda pid: None
        self._followers: list[Follower] = []
        # counts of news taken in, and of news whose effects are all out
        self._sent, self._out = (0, 0) if known is None else (known.count, known.out)
        # (count of news, time of queueing, effects to go out once standbys have these news, what is done before)
        self._waiting: deque[tuple[int, float, Effects, Callable[[], object]]] = deque()
        self._electorate = Electorate() if known is None else known.electorate
        self._to_agree: Electorate | None = None  # half of each of its memberships have to know of this term
        self._term, self._agreed_until = 0, 0.0

    # --- who stands by ---------------------------------------------------------------------------

    def watch(self, changes: Callable[[int], object]) -> None:
        """Call ``changes`` with the local process in step, or 0 for none, before anything goes out without it."""
        self._changes = changes
        for each in self._here:
            if each.in_step:
                changes(each.pid)

    @property
    def _here(self) -> list[Follower]:
        return [each for each in self._followers if not each.address]

    @property
    def elsewhere(self) -> list[Follower]:
        """The standby on another host, if there is one."""
        return [each for each in self._followers if each.address]

    def admit(self, control: Port, hello: Hello, host: str) -> Follower | None:
        """Begin to serve a standby, in place of one before; None if it is not wanted. ``host``: its address."""
        address = f"{host}:{hello.port}" if host and hello.port else ""
        if address and self._to_agree is not None:
            return None  # it may ask again
        if address and not self._board.succession.wants_one(self._board.membership.roster):
            control.send(Refused("no standby on another host is wanted"))
            return None
        if address and self.elsewhere:
            if self.elsewhere[0].in_step:
                control.send(Refused("another process stands by"))
            return None
        for before in [] if address else self._here:
            self.let_go(before)
        follower = Follower(control, hello.pid, address, self._sent, self._clock(), self._sent)
        self._followers.append(follower)
        state = json.dumps(dump(self._board)).encode()
        for first in range(0, len(state), PIECE):
            control.send(Snapshot(state[first : first + PIECE], first + PIECE >= len(state), self._sent))
        return follower

    def heard(self, follower: Follower, message: object) -> None:
        """Handle a standby's message: how many news it has."""
        if isinstance(message, Got) and follower in self._followers:
            self._has_taken(follower, message.count)

    def _has_taken(self, follower: Follower, count: int) -> None:
        follower.taken = count
        if not follower.in_step and count >= follower.mark and (self._is_agreed() or not follower.address):
            self._nears(follower)
        self._let_out()

    def _nears(self, follower: Follower) -> None:
        """Bring a standby into step once it has all news. If more always come, it is awaited for the present ones: what
        follows from later ones waits meanwhile.
        """
        if follower.taken < self._sent and not (follower.awaited and follower.taken >= follower.mark):
            follower.near, follower.awaited, follower.mark = True, follower.near, self._sent
            return
        follower.awaited = follower.in_step = True
        if follower.address:
            self._begin(follower.address)
        else:
            self._changes(follower.pid)

    def let_go(self, follower: Follower) -> None:
        """Wait no more for a standby, once it can't take this coordinator's place."""
        if follower in self._followers:
            self._followers.remove(follower)
            follower.control.close()
            if follower.in_step and follower.address:
                self.go_on_alone()
            elif follower.in_step:
                self._changes(0)
            self._let_out()

    def go_on_alone(self) -> None:
        """Let nothing out until enough workers know that nobody on another host can go on with them."""
        if not self._is_over():
            self._to_agree, self._agreed_until = self._electorate.copy(), self._clock() + AGREE_S
            self._begin("")
            self._term = self._board.succession.term

    # --- news ------------------------------------------------------------------------------------

    def take(self, news: News, effects: Effects) -> None:
        """Pass news on to standbys. Only news with effects are flushed at once: the sender of others repeats them if
        this process dies before they have got there.
        """
        self._sent += 1
        self._electorate.add(self._sent, self._board.membership.roster)
        if self._followers:
            waits = effects.some or not all(each.in_step for each in self._followers)
            frame = encode(news.taken(self._out, waits))
            for each in self._followers:
                each.control.send(frame, more=True)
                if waits:
                    each.control.flush_soon()

    def then(self, effects: Effects, first: Callable[[], object] = lambda: None) -> None:
        """Let out ``effects`` of the last news, after calling ``first``, once the standbys have these news."""
        if effects.some and (self._waiting or not self._may_go(self._sent)):
            self._waiting.append((self._sent, self._clock(), effects, first))
        else:
            if not any(each.awaited for each in self._followers):
                self._is_out(self._sent)
            first()
            self._release(effects)
        self._let_out()

    @property
    def holds_up(self) -> bool:
        """Whether decisions do not get out. Nobody is to be given up then: this host may be the one that is cut off."""
        return bool(self._waiting) and self._clock() - self._waiting[0][1] > HELD_S

    def see_late(self) -> None:
        """Flush what waits for more; let go standbys that are late, never come into step, or aren't wanted any more."""
        for each in list(self._followers):
            each.control.flush_soon()
            if not each.in_step and self._clock() - each.since > STEP_S:
                self.let_go(each)
        if not self._is_agreed() and self._clock() > self._agreed_until:
            self._depose()
        elif self._waiting:
            news, late_s = self._waiting[0][0], self._clock() - self._waiting[0][1] - LATE_S
            for each in [each for each in self._followers if each.awaited and each.taken < news]:
                if late_s > (self._board.term_told.silent_s if each.address else 0.0):  # a line may be cut for a moment
                    self.let_go(each)
        if self.elsewhere and not self._board.succession.wants_one(self._board.membership.roster):
            self.let_go(self.elsewhere[0])

    def _is_agreed(self) -> bool:
        """Return whether nobody on another host can go on without this coordinator."""
        if self._to_agree is not None and self._to_agree.gives(self._board.knowing(self._term), more=False):
            self._to_agree = None
        return self._to_agree is None

    def _may_go(self, news: int) -> bool:
        return self._is_agreed() and all(each.taken >= news for each in self._followers if each.awaited)

    def _let_out(self) -> None:
        while self._waiting and self._may_go(self._waiting[0][0]):
            news, _, effects, first = self._waiting.popleft()
            self._is_out(news)
            first()
            self._release(effects)

    def _is_out(self, news: int) -> None:
        self._out = news
        self._electorate.out(news)


@dataclass
class Known:
    """What a standby knows: the ``board`` with the last news, their ``count``, their time ``now`` by the coordinator's
    clock, how many of them have all effects ``out``, and the memberships that others may go by.
    """

    board: Switchboard
    count: int
    out: int = 0
    now: float = 0.0
    _events: deque[tuple[int, Event]] = field(default_factory=deque)
    electorate: Electorate = field(default_factory=Electorate)

    @property
    def events(self) -> list[Event]:
        """Events that the coordinator may not have told."""
        return [event for _, event in self._events]

    def take(self, message: Taken) -> None:
        """Take in news."""
        self.count, self.out, self.now = self.count + 1, message.out, message.now
        news = News.of(message)
        NEWS[news.kind](self.board, news, effects := Effects())
        self._events += [(self.count, event) for event in effects.events]
        # before the start nobody has written them down
        while self._events and self._events[0][0] <= self.out and self.board.start is not None:
            self._events.popleft()
        self.electorate.add(self.count, self.board.membership.roster)
        self.electorate.out(self.out)

    def is_elected(self, port: int, turned: Iterable[Hello]) -> bool:
        """Return whether enough workers ``turned`` to the process that listens at ``port``, and it is the standby of
        the last term that it knows of: before that term was told, the coordinator may go on without it.
        """
        address, workers = self.board.succession.address, set()
        for each in turned:
            if (line := self.board.known(each)) is not None and line.worker is not None:
                workers.add(line.worker)
            elif each.role == WORKER and self.board.was_closed(each):  # it counts as lost, and as a voter it is there
                workers.add(WorkerId(each.rank, each.incarnation))
        return address is not None and address[1] == port and self.electorate.gives(workers, more=True)


class Turned(Generic[End]):
    """The ends that have turned to a standby on another host, by their connections."""

    def __init__(self) -> None:
        self._ends: dict[End, tuple[Hello, int]] = {}  # with the count of news when they came

    def __iter__(self) -> Iterator[tuple[End, Hello]]:
        return ((control, hello) for control, (hello, _) in self._ends.items())

    def add(self, control: End, hello: Hello, known: Known | None) -> None:
        """Count an end. Look at it (:meth:`send_back`) every ``TURNED_S`` from then on."""
        self._ends[control] = hello, -1 if known is None else known.count

    def gone_s(self, hangs: bool) -> float:
        """Return the seconds for ends on the coordinator's host to come: none if that is silent to every worker that
        has. ``hangs``: the coordinator has not closed its connection to the standby.
        """
        if all(hello.silent for _, hello in self if hello.role == WORKER):
            return 0.0
        return LATER_S if hangs else GONE_S

    def elect(self, port: int, known: Known | None) -> bool:
        """Return whether these elect the standby that listens at ``port``."""
        return known is not None and known.is_elected(port, (hello for _, hello in self))

    def send_back(self, control: End, known: Known | None) -> bool:
        """Send an end back if the coordinator has gone on since it came. Return whether to look at it again."""
        if control not in self._ends or known is None or known.count <= self._ends[control][1]:
            return control in self._ends
        del self._ends[control]
        control.send(SentBack())
        return False

    def send_all_back(self) -> None:
        """Send all ends back: this standby never leads."""
        for control in self._ends:
            control.send(SentBack())
        self._ends.clear()


class Following:
    """How a standby takes in what the coordinator sends. ``learnt`` gets what is known once the whole state has come;
    that is kept up to date from then on.
    """

    def __init__(self, learnt: Callable[[Known], object]) -> None:
        self._learnt, self._pieces = learnt, bytearray()
        self._known: Known | None = None
        self._waits = False

    def hear(self, message: object) -> bool:
        """Handle a message of the coordinator. Return whether this process is still wanted."""
        if isinstance(message, Snapshot):
            self._pieces += message.piece
            if message.last:
                self._known, self._waits = Known(load(json.loads(self._pieces)), message.count), True
                self._known.electorate.add(message.count, self._known.board.membership.roster)
                self._learnt(self._known)
        elif isinstance(message, Taken) and self._known is not None:
            self._waits = self._waits or message.waits
            self._known.take(message)
        return not isinstance(message, Refused)

    def answer(self) -> Got | None:
        """Return the answer that is due, once all that has come is taken in."""
        waits, self._waits = self._waits, False
        return Got(self._known.count) if waits and self._known is not None else None
