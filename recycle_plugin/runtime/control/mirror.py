"""A process that stands by takes in all that the coordinator does, and goes on from there if that dies.

The coordinator sends its whole state once, and from then on all that it takes in.  Once the other has caught up, both
are *in step*: nothing that follows from news goes out before the other has them, so that whatever anybody in the job
has heard, the other knows too.  One that takes nothing for a while is let go, and nobody waits for it any more; only
then may the coordinator go on alone, and whoever decides on its death has to hear so first (``changes``).
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from recycle_plugin.core.coordinator.output import Event
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.coordinator.switchboard import NEWS, Effects, News, Switchboard
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.mirroring import Got, Snapshot, Taken
from recycle_plugin.runtime.control.in_loop import InLoop

STANDBY = "standby"  # its role
PIECE = 1 << 20  # bytes of the state that are sent at once
LISTEN_S = 60.0  # how long nothing need be heard
LATE_S = 2.0  # how long who stands by may take to take news in


class Mirror:
    """What the coordinator knows of who stands by.

    ``release`` lets others see what has followed from news.
    """

    def __init__(self, release: Callable[[Effects], None]) -> None:
        self._release = release
        self._changes: Callable[[int], object] = lambda pid: None
        self._control: InLoop | None = None
        self._pid = 0
        self._in_step = False
        self._sent = self._out = 0
        # what is to go out once so many news were taken in, and what is done before; with when it was put there
        self._waiting: deque[tuple[int, float, Effects, Callable[[], object]]] = deque()

    def watch(self, changes: Callable[[int], object]) -> None:
        """Call ``changes`` with the process that is in step, or with 0 where there is none any more, before anything
        goes out without it.
        """
        self._changes = changes
        if self._in_step:
            changes(self._pid)

    def take(self, news: News, effects: Effects) -> None:
        """Pass on what was taken in, and what has ``effects`` at once: who has said the rest says it again where this
        process dies before that has got there.
        """
        if self._control is not None:
            self._sent += 1
            waits = effects.some or not self._in_step
            self._control.send(replace(news.taken, out=self._out, waits=waits), more=True)
            if waits:
                self._control.flush_soon()

    def then(self, effects: Effects, first: Callable[[], object] = lambda: None) -> None:
        """Let out ``effects`` of the last news, behind ``first``, once who stands by has them."""
        if self._in_step and effects.some:
            self._waiting.append((self._sent, time.monotonic(), effects, first))
        else:
            self._out = self._out if self._in_step else self._sent
            first()
            self._release(effects)

    def see_late(self) -> None:
        """Pass on what waits for more, and let go who has taken nothing for too long."""
        if self._control is not None:
            self._control.flush_soon()
        if self._waiting and time.monotonic() - self._waiting[0][1] > LATE_S and self._control is not None:
            self._control.close()
            self._alone()

    async def serve(self, control: InLoop, hello: Hello, board: Switchboard) -> None:
        """Serve a process that stands by, in place of one before."""
        if self._control is not None:
            self._control.close()
            self._alone()
        self._control, self._pid, self._sent, self._out = control, hello.pid, 0, 0
        state = json.dumps(dump(board)).encode()
        for first in range(0, len(state), PIECE):
            control.send(Snapshot(state[first : first + PIECE], first + PIECE >= len(state)))
        while (message := await control.receive(LISTEN_S)) is not None or control.broken is None:
            if isinstance(message, Got) and self._control is control:
                self._has_taken(message.count)
        if self._control is control:
            self._alone()

    def _has_taken(self, count: int) -> None:
        if not self._in_step and count == self._sent:
            self._in_step = True
            self._changes(self._pid)
        while self._waiting and self._waiting[0][0] <= count:
            self._let_out()

    def _alone(self) -> None:
        self._control = None
        if self._in_step:
            self._in_step = False
            self._changes(0)
        while self._waiting:
            self._let_out()

    def _let_out(self) -> None:
        self._out, _, effects, first = self._waiting.popleft()
        first()
        self._release(effects)


async def stand_by(control: InLoop, hello: Hello) -> tuple[Switchboard, list[Event]] | None:
    """Take in all that the coordinator at the other end of ``control`` does, until it is gone; its switchboard as that
    was with the last of it, and the events that it may not have told of.  None if there was not all of it.
    """
    control.send(hello)
    pieces: list[bytes] = []
    board: Switchboard | None = None
    taken, waits = 0, False
    events: deque[tuple[int, Event]] = deque()
    while control.broken is None:
        message = await control.receive(0.0)
        if message is None:  # it has all that has come
            if waits:
                waits = False
                control.send(Got(taken))
            message = await control.receive(LISTEN_S)
        if isinstance(message, Snapshot):
            pieces.append(message.piece)
            if message.last:
                board = load(json.loads(b"".join(pieces)))
                control.send(Got(0))
        elif isinstance(message, Taken) and board is not None:
            news = News.of(message)
            NEWS[news.kind](board, news, effects := Effects())
            taken, waits = taken + 1, waits or message.waits
            events += [(taken, event) for event in effects.events]
            while events and events[0][0] <= message.out:
                events.popleft()
    return None if board is None else (board, [event for _, event in events])
