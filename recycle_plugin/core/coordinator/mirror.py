"""A process that stands by takes in all that the coordinator does, and goes on from there if that dies.

The coordinator sends its whole state once, and from then on all that it takes in.  Once the other has caught up, both
are *in step*: nothing that follows from news goes out before the other has them, so that whatever anybody in the job
has heard, the other knows too.  One that takes nothing for a while is let go, and nobody waits for it any more; but
only once it can't take the coordinator's place: on the coordinator's own host their guard decides on that, which hears
so first (``changes``); of one on another host enough workers have to know (core/coordinator/succession.py).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.coordinator.lines import Effects
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.coordinator.succession import Electorate
from recycle_plugin.core.coordinator.switchboard import NEWS, News, Switchboard
from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_coordinator import Refused
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.mirroring import Got, Snapshot, Taken

STANDBY = "standby"  # its role
PIECE = 1 << 20  # bytes of the state that are sent at once
LATE_S = 2.0  # how long who stands by may take to take news in
STEP_S = 30.0  # how long it may take until it is in step
HELD_S = 0.5  # how long it mostly takes them, and more
AGREE_S = 10.0  # how long enough workers may take to say that they know of a term


class Port(Protocol):
    """What the coordinator has of a connection, however that is made."""

    def send(self, message: object, more: bool = False) -> object:
        """Send a message, or its frame; ``more``: it goes along with the next one, or with :meth:`flush_soon`."""

    def flush_soon(self) -> None:
        """Send what is kept for more."""

    def close(self) -> None:
        """Close it."""


@dataclass
class Follower:
    """A process that stands by, ``since`` then: it has ``taken`` so many news, and listens at the ``address``, where it
    is on another host than the coordinator.  Once it has the first ``mark`` it is nearer to being in step: ``awaited``
    before anything goes out, and then ``in_step``.
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
    """What the coordinator knows of those who stand by.

    * ``release`` lets others see what has followed from news.
    * ``begin(address)`` has the next term begin, with one that stands by on another host, or none.
    * ``depose`` is called where the others may go on without this coordinator, which can't be once it ``is_over``, and
      all have been told so.
    * ``clock()`` gives the seconds since some moment.
    * ``known``: what another one has known, whose place this one has taken.
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
        # news that were taken in, and those of which all that follows is out
        self._sent, self._out = (0, 0) if known is None else (known.count, known.out)
        # what is to go out once so many news were taken in, and what is done before; with when it was put there
        self._waiting: deque[tuple[int, float, Effects, Callable[[], object]]] = deque()
        self._electorate = Electorate() if known is None else known.electorate
        self._to_agree: Electorate | None = None  # of which half have to know of this term
        self._term, self._agreed_until = 0, 0.0

    # --- who stands by ---------------------------------------------------------------------------

    def watch(self, changes: Callable[[int], object]) -> None:
        """Call ``changes`` with the process on this host that is in step, or with 0 where there is none any more,
        before anything goes out without it.
        """
        self._changes = changes
        for each in self._here:
            if each.in_step:
                changes(each.pid)

    @property
    def _here(self) -> list[Follower]:
        return [each for each in self._followers if not each.address]

    @property
    def elsewhere(self) -> list[Follower]:
        """The one on another host, if there is one."""
        return [each for each in self._followers if each.address]

    def admit(self, control: Port, hello: Hello, host: str) -> Follower | None:
        """Begin to serve a process that stands by, in place of one before; None where it is not to.  ``host``: its
        address.
        """
        address = f"{host}:{hello.port}" if host and hello.port else ""
        if address and self._to_agree is not None:
            return None  # it may ask again
        if address and not self._board.succession.wants_one(self._board.membership.roster):
            control.send(Refused("nobody on another host is to stand by"))
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
        """Take in what one that stands by says: how much it has."""
        if isinstance(message, Got) and follower in self._followers:
            self._has_taken(follower, message.count)

    def _has_taken(self, follower: Follower, count: int) -> None:
        follower.taken = count
        if not follower.in_step and count >= follower.mark and (self._is_agreed() or not follower.address):
            self._nears(follower)
        self._let_out()

    def _nears(self, follower: Follower) -> None:
        """Have it be in step once it has all news; where there are always more, those of now, and what follows from
        later ones waits meanwhile.
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
        """Wait no more for one that stands by, once it can't go on in this one's place."""
        if follower in self._followers:
            self._followers.remove(follower)
            follower.control.close()
            if follower.in_step and follower.address:
                self.go_on_alone()
            elif follower.in_step:
                self._changes(0)
            self._let_out()

    def go_on_alone(self) -> None:
        """Let nothing out any more before enough workers know that nobody on another host can go on with them."""
        if not self._is_over():
            self._to_agree, self._agreed_until = self._electorate.copy(), self._clock() + AGREE_S
            self._begin("")
            self._term = self._board.succession.term

    # --- news ------------------------------------------------------------------------------------

    def take(self, news: News, effects: Effects) -> None:
        """Pass on what was taken in, and what has ``effects`` at once: who has said the rest says it again where this
        process dies before that has got there.
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
        """Let out ``effects`` of the last news, behind ``first``, once those who stand by have them."""
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
        """Whether what was decided does not get out.  Nobody is to be given up then: it may be this host that is cut
        off.
        """
        return bool(self._waiting) and self._clock() - self._waiting[0][1] > HELD_S

    def see_late(self) -> None:
        """Pass on what waits for more, and let go who has taken nothing for too long, never comes to be in step, or is
        not wanted any more.
        """
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
        """Whether nobody on another host can go on without this one."""
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
    """What a process that stands by knows: the ``board`` as it was with the last news, which were so many (``count``)
    and came at ``now`` by the coordinator's clock, and of how many all that follows is ``out``; the memberships that
    others may go by.
    """

    board: Switchboard
    count: int
    out: int = 0
    now: float = 0.0
    _events: deque[tuple[int, Event]] = field(default_factory=deque)
    electorate: Electorate = field(default_factory=Electorate)

    @property
    def events(self) -> list[Event]:
        """Those that the coordinator may not have told of."""
        return [event for _, event in self._events]

    def take(self, message: Taken) -> None:
        """Take news in."""
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
        """Whether enough workers ``turned`` to the process that listens at ``port``, and it was told of in the last
        term that it knows of: before, the coordinator may go on without it.
        """
        address = self.board.succession.address
        lines = [self.board.known(each) for each in turned]
        workers = {line.worker for line in lines if line is not None and line.worker is not None}
        return address is not None and address[1] == port and self.electorate.gives(workers, more=True)


class Following:
    """How a process that stands by takes in what the coordinator sends.  ``learnt`` gets what is known once its whole
    state has come, and that then goes on by itself.
    """

    def __init__(self, learnt: Callable[[Known], object]) -> None:
        self._learnt, self._pieces = learnt, bytearray()
        self._known: Known | None = None
        self._waits = False

    def hear(self, message: object) -> bool:
        """Take a message in; whether this process is wanted still."""
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
        """What is to be answered, once all that has come is taken in."""
        waits, self._waits = self._waits, False
        return Got(self._known.count) if waits and self._known is not None else None
