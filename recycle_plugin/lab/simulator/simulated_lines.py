"""The connections of a simulated job to its coordinators, like TCP. What goes in comes out in order, and waits as long
as hosts can't reach each other. The end of a process closes its connections, but the loss of a host closes none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.kept import BEATS, UNCOUNTED
from recycle_plugin.core.messages.line_end import LineEnd, Tries
from recycle_plugin.core.messages.mirroring import StandsBy

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.takeovers import Takeovers

CLOSED = object()  # what a connection's end is told last
SECOND = 1_000_000  # microseconds
RETRY_US = 50_000  # between two tries to connect
ATTEMPT_S = 5.0  # one try, if nobody answers
CONNECT_S, RESUME_S = 60.0, 10.0  # how long a new process tries, and a returning end
ANSWER_S, SILENT = 1.0, 3  # the coordinator is silent after so late an answer, or so many missing acknowledgements
Address = tuple[str, int]
read = lru_cache(maxsize=1 << 12)(decode)


class Side:
    """A process's end of a connection, on the host of rank ``host``; ``hear`` and ``breaks`` are called with it."""

    def __init__(self, hosts: Hosts, way: tuple, host: int) -> None:
        self._hosts, self.way, self.host = hosts, way, host
        self.other: Side
        self.closed = self.reset = False
        self.held: list[object] = []  # what waits, since the other's host can't reach this one
        self.hear: Callable[[Side, Any], None]
        self.breaks: Callable[[Side], None]

    def send(self, message: object, more: bool = False) -> None:
        """Send a message, or its frame."""
        if not self.closed:
            self._hosts.carry(self, message)

    def flush_soon(self) -> None:
        """Do nothing: nothing is kept for more."""

    def close(self) -> None:
        """Close the connection: the other end hears that last."""
        if not self.closed:
            self._hosts.carry(self, CLOSED)
            self.closed = True

    @property
    def is_cut(self) -> bool:
        """Whether nothing gets through, in one direction or both."""
        return not self._hosts.reaches(self.host, self.other.host) or not self._hosts.reaches(
            self.other.host, self.host
        )


class Hosts:
    """The hosts of a job, one for each rank, and what is under way between them."""

    def __init__(self, takeovers: Takeovers) -> None:
        self._cluster = takeovers.cluster
        self._blocked: set[tuple[str, int]] = set()  # what goes ("from", host) or ("to", host) is held up
        self._sides: list[Side] = []

    def reaches(self, source: int, target: int) -> bool:
        """Return whether what one host sends gets to another now."""
        cut, lost = self._cluster.cut - self._cluster.lost_hosts, self._cluster.lost_hosts
        if source in lost or target in lost:
            return False
        if source == target:
            return True
        held = ("from", source) in self._blocked or ("to", target) in self._blocked
        return (source in cut) == (target in cut) and not held

    def connected(self, name: tuple, caller: int, listener: int) -> tuple[Side, Side]:
        """Return both ends of a new connection."""
        near, far = Side(self, (*name, "there"), caller), Side(self, (*name, "back"), listener)
        near.other, far.other = far, near
        self._sides += [near, far]
        return near, far

    def carry(self, side: Side, what: object) -> None:
        """Have something travel from one end to the other."""
        self._cluster.travel(side.way, partial(self._arrive, side, what))

    def _arrive(self, side: Side, what: object) -> None:
        target = side.other
        if target.held or not self.reaches(side.host, target.host):
            target.held.append(what)
        else:
            self._hand(target, what)

    @staticmethod
    def _hand(target: Side, what: object) -> None:
        if target.closed:
            return
        if what is CLOSED:
            target.closed = True
            target.breaks(target)
        else:
            target.hear(target, read(what) if isinstance(what, bytes) else what)

    def hold(self, way: str, host: int, held: bool) -> None:
        """Hold up what goes ``way``, "from" a host or "to" it, or let it go on."""
        (self._blocked.add if held else self._blocked.discard)((way, host))
        self.flow()

    @staticmethod
    def reset(side: Side) -> None:
        """Break a connection; both of its ends live, and find out at once."""
        for each in (side, side.other):
            if not each.closed:
                each.closed = each.reset = True
                each.breaks(each)

    def flow(self) -> None:
        """Let through what has waited, between hosts that reach each other again."""
        self._sides = [side for side in self._sides if not (side.closed and side.other.closed)]
        for side in self._sides:
            if side.held and self.reaches(side.other.host, side.host):
                held, side.held = side.held, []
                for what in held:
                    self._hand(side, what)

    def dies(self, host: int) -> None:
        """Take a host away, without a word."""
        for side in self._sides:
            side.closed = side.closed or side.host == host


class SimulatedEnd(LineEnd):
    """A worker's or a supervisor's end of its connection, first at ``address``. ``news`` gets what comes over it.
    ``begins`` is called once it is welcomed, ``lost`` once nobody is found any more.
    """

    def __init__(
        self,
        takeovers: Takeovers,
        hello: Hello,
        address: Callable[[], Address],
        begins: Callable[[], None],
        news: Callable[[Any], None],
        lost: Callable[[], None],
    ) -> None:
        super().__init__()
        self._takeovers, self.hello, self._first = takeovers, hello, address
        self._begins, self._news, self._lost = begins, news, lost
        self.address = address()
        self.said: list[bytes] = []  # all messages that the coordinator is to count
        self.token = ""
        self._early: list[object] = []  # what was said before it was welcomed
        self._side: Side | None = None
        self._silent = False  # whether its tries began since nothing at all came from there
        self._tries: Tries | None = self._begin_to_try(CONNECT_S)  # while it is not connected
        self._going: Address = self.address
        self._heard_s = self._reached_s = takeovers.now_s
        self.dead = False
        self._try()

    # --- connecting -----------------------------------------------------------------------------------

    def _begin_to_try(self, timeout_s: float) -> Tries:
        elsewhere = self._elsewhere(self.hello.role, self.address) is not None
        decides = self.hello.role == "worker"
        return Tries(self._takeovers.now_s, timeout_s, elsewhere, self._term.silent_s, self._silent, decides)

    def _try(self) -> None:
        tries = self._tries
        if self.dead or tries is None:
            return
        if self._takeovers.now_s >= tries.until:
            self._give_up_all()
            return
        elsewhere = self._elsewhere(self.hello.role, self.address)
        goes = tries.next(self._takeovers.now_s, elsewhere is not None)
        home = self._first() if self.line < 0 else self.address
        self._going = elsewhere if goes and elsewhere is not None else home
        name = self.hello.role, self.hello.rank
        side = self._takeovers.call(name, self.hello.rank, self._going)
        if side is None:
            silent = self._takeovers.is_silent(self.hello.rank, self._going)
            self._silent = self._silent and (silent or self._going == elsewhere)
            try_s = ATTEMPT_S if elsewhere is None else tries.lasts_s(self._takeovers.now_s)
            self._takeovers.cluster.later(int(try_s * silent * SECOND) + RETRY_US, self._try)
            return
        self._side, side.hear, side.breaks = side, self._hear, self._breaks
        side.send(self._again(self.hello, self._silent) if self.line >= 0 else self.hello)

    def _answered(self, side: Side, message: object) -> None:
        tries = self._tries
        assert tries is not None, "it is not connected"
        if isinstance(message, StandsBy):
            if (knows := self._noted(message)) is not None:
                side.send(knows)
        elif isinstance(message, Welcome):
            self._stand(side, message)
        else:
            side.close()
            self._side = None
            self._go_on_trying(message)

    def _stand(self, side: Side, welcome: Welcome) -> None:
        first, turned, self._tries = self.line < 0, self._going != self.address, None
        if welcome.line != self.line:
            self.said.clear()
        self.address, self.token = self._going, welcome.token
        for frame in self._since(welcome):
            side.send(frame)
        if turned and not first:
            self._has_turned()
        early, self._early = self._early, []
        for message in early:
            self.send(message)
        self._heard_s = self._reached_s = self._takeovers.now_s
        self._takeovers.reach("begun" if first else "back")
        if first:
            self._begins()

    def _go_on_trying(self, answer: object | None) -> None:
        assert self._tries is not None, "it is not connected"
        if self.line >= 0 and self._tries.are_over(answer):
            self._give_up_all()
        else:
            self._takeovers.cluster.later(RETRY_US, self._try)

    def _give_up_all(self) -> None:
        if not self.dead:
            self.close()
            self._lost()

    # --- talking --------------------------------------------------------------------------------------

    def send(self, message: object) -> None:
        """Send a message to the coordinator."""
        if self.dead:
            return
        if self.line < 0:
            self._early.append(message)
            return
        frame = encode(message)
        self._keep(message, frame)
        if not isinstance(message, UNCOUNTED):
            self.said.append(frame)
        if self._side is not None and self._tries is None:
            self._side.send(message)

    def _hear(self, side: Side, message: object) -> None:
        if side is not self._side or self.dead:
            return
        self._heard_s = self._takeovers.now_s
        if self._tries is not None:
            self._answered(side, message)
        elif self._is_news(message):
            whole = self._whole(message)
            if not isinstance(message, UNCOUNTED):
                self._takeovers.one.heard(self, self._heard.count, message, whole)
            self._news(whole)

    def _breaks(self, side: Side, silent: bool = False) -> None:
        if side is not self._side or self.dead:
            return
        self._side = None
        if self._tries is not None:
            self._go_on_trying(None)
        else:
            self._silent = silent
            self._tries = self._begin_to_try(RESUME_S)
            self._try()

    def resets(self) -> None:
        """Have its connection reset, if it has one."""
        if self._side is not None and not self.dead:
            self._takeovers.hosts.reset(self._side)

    def close(self) -> None:
        """Close it for good: its process has died."""
        self.dead = True
        if self._side is not None:
            self._side.close()

    def look(self, cut_off_s: float) -> None:
        """See whether nothing gets through or is heard: then turn to another process, or give up, by ``cut_off_s``."""
        side, now_s = self._side, self._takeovers.now_s
        if self.dead or side is None:
            return
        if not side.is_cut:
            self._reached_s = now_s
        if self._tries is not None:
            if now_s >= self._tries.until:
                self._give_up_all()
            return
        worker = self.hello.role == "worker"
        silent = now_s > self._heard_s + self._term.silent_s + ANSWER_S if worker else self._is_unheard
        cut = now_s > self._reached_s + self._term.silent_s
        if (last := self._last_word()) is not None and (silent or cut):
            side.send(last)
            side.close()
            self._breaks(side, cut)
        elif worker and now_s > self._heard_s + cut_off_s:
            self._give_up_all()

    @property
    def _is_unheard(self) -> bool:
        return self._kept.count - self._kept.dropped > SILENT * BEATS
