"""A process that stands by takes in all that the coordinator does, and goes on from there if that dies.

The coordinator sends its whole state once, and from then on all that it takes in.  Once the other has caught up, both
are *in step*: nothing that follows from news goes out before the other has them, so that whatever anybody in the job
has heard, the other knows too.  One that takes nothing for a while is let go, and nobody waits for it any more; but
only once it can't take the coordinator's place: on the coordinator's own host their guard decides on that, which hears
so first (``changes``); of one on another host enough workers have to know (core/coordinator/succession.py).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recycle_plugin.core.coordinator.lines import Effects
from recycle_plugin.core.coordinator.output import Event
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.coordinator.succession import Electorate
from recycle_plugin.core.coordinator.switchboard import NEWS, News, Switchboard
from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_coordinator import Refused
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.mirroring import Got, Snapshot, Taken
from recycle_plugin.runtime.control.in_loop import InLoop

STANDBY = "standby"  # its role
PIECE = 1 << 20  # bytes of the state that are sent at once
LISTEN_S = 60.0  # how long nothing need be heard
LATE_S = 2.0  # how long who stands by may take to take news in
HELD_S = 0.5  # how long it mostly takes them, and more
AGREE_S = 10.0  # how long enough workers may take to say that they know of a term


@dataclass
class Follower:
    """A process that stands by: it has ``taken`` so many news, and listens at the ``address``, where it is on another
    host than the coordinator.
    """

    control: InLoop
    pid: int
    address: str
    taken: int
    in_step: bool = False


class Mirror:
    """What the coordinator knows of those who stand by.

    * ``release`` lets others see what has followed from news.
    * ``begin(address)`` has the next term begin, with one that stands by on another host, or none.
    * ``depose`` is called where the others may go on without this coordinator, which can't be once it is ``over``, and
      all have been told so.
    * ``known``: what another one has known, whose place this one has taken.
    """

    def __init__(
        self,
        board: Switchboard,
        release: Callable[[Effects], None],
        begin: Callable[[str], None],
        depose: Callable[[], object],
        over: asyncio.Event,
        known: Known | None = None,
    ) -> None:
        self._board, self._release, self._begin, self._depose, self._over = board, release, begin, depose, over
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

    async def serve(self, control: InLoop, hello: Hello) -> None:
        """Serve a process that stands by, in place of one before."""
        there = control.there
        address = f"{there[0]}:{hello.port}" if hello.port and there is not None else ""
        if address and self._to_agree is not None:
            return  # it may ask again
        if address and not self._board.succession.wants_one(self._board.membership.roster):
            control.send(Refused("nobody on another host is to stand by"))
            return
        if address and self.elsewhere:
            if self.elsewhere[0].in_step:
                control.send(Refused("another process stands by"))
            return
        for before in [] if address else self._here:
            self._let_go(before)
        follower = Follower(control, hello.pid, address, self._sent)
        self._followers.append(follower)
        state = json.dumps(dump(self._board)).encode()
        for first in range(0, len(state), PIECE):
            control.send(Snapshot(state[first : first + PIECE], first + PIECE >= len(state), self._sent))
        while (message := await control.receive(LISTEN_S)) is not None or control.broken is None:
            if isinstance(message, Got) and follower in self._followers:
                self._has_taken(follower, message.count)
        self._let_go(follower)

    def _has_taken(self, follower: Follower, count: int) -> None:
        follower.taken = count
        if not follower.in_step and count == self._sent and (self._is_agreed() or not follower.address):
            follower.in_step = True
            if follower.address:
                self._begin(follower.address)
            else:
                self._changes(follower.pid)
        self._let_out()

    def _let_go(self, follower: Follower) -> None:
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
        if not self._over.is_set():
            self._to_agree, self._agreed_until = self._electorate.copy(), time.monotonic() + AGREE_S
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
            self._waiting.append((self._sent, time.monotonic(), effects, first))
        else:
            if not any(each.in_step for each in self._followers):
                self._is_out(self._sent)
            first()
            self._release(effects)
        self._let_out()

    @property
    def holds_up(self) -> bool:
        """Whether what was decided does not get out.  Nobody is to be given up then: it may be this host that is cut
        off.
        """
        return bool(self._waiting) and time.monotonic() - self._waiting[0][1] > HELD_S

    def see_late(self) -> None:
        """Pass on what waits for more, and let go who has taken nothing for too long, or is not wanted any more."""
        for each in self._followers:
            each.control.flush_soon()
        if not self._is_agreed() and time.monotonic() > self._agreed_until:
            self._depose()
        elif self._waiting:
            news, late_s = self._waiting[0][0], time.monotonic() - self._waiting[0][1] - LATE_S
            for each in [each for each in self._followers if each.in_step and each.taken < news]:
                if late_s > (self._board.term_told.silent_s if each.address else 0.0):  # a line may be cut for a moment
                    self._let_go(each)
        if self.elsewhere and not self._board.succession.wants_one(self._board.membership.roster):
            self._let_go(self.elsewhere[0])

    def _is_agreed(self) -> bool:
        """Whether nobody on another host can go on without this one."""
        if self._to_agree is not None and self._to_agree.gives(self._board.knowing(self._term), more=False):
            self._to_agree = None
        return self._to_agree is None

    def _may_go(self, news: int) -> bool:
        return self._is_agreed() and all(each.taken >= news for each in self._followers if each.in_step)

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


async def follow(control: InLoop, hello: Hello, learnt: Callable[[Known], Any]) -> bool:
    """Take in all that the coordinator at the other end of ``control`` does, until it is gone.  ``learnt`` gets what is
    known once its whole state has come, and that then goes on by itself.  Returns whether it may be asked again.
    """
    control.send(hello)
    pieces: list[bytes] = []
    known, waits = None, False
    while control.broken is None:
        message = await control.receive(0.0)
        if message is None:  # it has all that has come
            if waits and known is not None:
                waits = False
                control.send(Got(known.count))
            message = await control.receive(LISTEN_S)
        if isinstance(message, Snapshot):
            pieces.append(message.piece)
            if message.last:
                known, waits = Known(load(json.loads(b"".join(pieces))), message.count), True
                known.electorate.add(known.count, known.board.membership.roster)
                learnt(known)
        elif isinstance(message, Taken) and known is not None:
            waits = waits or message.waits
            known.take(message)
        elif isinstance(message, Refused):
            return False
    return True
