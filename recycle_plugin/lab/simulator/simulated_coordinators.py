"""Processes of a simulated job that coordinate or stand by, with the real exchange.py and mirror.py that decide."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from recycle_plugin.core.coordinator.exchange import Exchange
from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.coordinator.lines import Effects
from recycle_plugin.core.coordinator.mirror import STANDBY, TURNED_S, Follower, Following, Known, Port, Turned
from recycle_plugin.core.coordinator.switchboard import WORKER, News, Switchboard
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.kept import UNCOUNTED
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.scenario import MILLISECOND
from recycle_plugin.lab.simulator.simulated_lines import RETRY_US, SECOND, Side

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.takeovers import Takeovers

AGAIN_US = 500 * MILLISECOND  # until a standby elsewhere connects once more


class Process:
    """A process on the host of rank ``host`` that answers calls: the coordinator, or a standby."""

    def __init__(self, takeovers: Takeovers, host: int) -> None:
        self.takeovers, self.host, self.pid = takeovers, host, takeovers.next_pid()
        self.alive, self.stopped_until = True, 0
        self._sides: list[Side] = []
        self._inbox: deque[Callable[[], object]] = deque()

    def do(self, happen: Callable[[], object]) -> None:
        """Do something, once the process runs and has done what came before."""
        self._inbox.append(happen)
        if self.takeovers.cluster.now >= self.stopped_until:
            self.go_on()

    def go_on(self) -> None:
        """Do all that waits."""
        while self._inbox and self.alive and self.takeovers.cluster.now >= self.stopped_until:
            self._inbox.popleft()()

    def answers(self, side: Side) -> None:
        """Make ``side`` this process's end of a connection."""
        self._sides.append(side)
        side.hear = lambda side, message: self.do(partial(self.heard, side, message))
        side.breaks = lambda side: self.do(partial(self.broken, side))

    def heard(self, side: Side, message: Any) -> None:
        """Handle what comes over one of its connections."""

    def broken(self, side: Side) -> None:
        """Handle the end of one of its connections."""

    def dies(self) -> None:
        """End; the system closes its connections."""
        self.alive = False
        for side in self._sides:
            side.close()


class SimulatedCoordinator(Exchange, Process):
    """A coordinator's process on the host of rank ``host``. ``known``: it goes on from that."""

    def __init__(self, takeovers: Takeovers, host: int, board: Switchboard, known: Known | None = None) -> None:
        Process.__init__(self, takeovers, host)
        self._serving: dict[Side, Follower | int] = {}
        self._again: list[Effects] = []  # effects that were said before
        self.deposed = False
        self.over = board.over is not None
        Exchange.__init__(self, board, known)

    def begin(self, gone: str = "", gone_s: float = 0.0) -> None:
        """Begin to coordinate. ``gone``: the host that is gone, if any, whose ends are awaited for ``gone_s``."""
        self._goes_on(gone, gone_s)
        self._tick()

    def took_over(self) -> None:
        """Begin as a former standby on the coordinator's host."""
        self._follows()
        self.begin()

    def _tick(self) -> None:
        self._pass_time()
        self.takeovers.cluster.later(int(TICK_S * 1e6), partial(self.do, self._tick))

    # --- its connections ------------------------------------------------------------------------------

    def heard(self, side: Side, message: Any) -> None:
        """Handle what comes over one of its connections."""
        if side not in self._serving:
            self._answer(side, message)
            return
        served = self._serving[side]
        if isinstance(served, Follower):
            self.mirror.heard(served, message)
        else:
            self._said(served, message)

    def _answer(self, side: Side, hello: Hello) -> None:
        if hello.role == STANDBY:
            served: Follower | int | None = self.mirror.admit(side, hello, f"host{side.other.host}" * bool(hello.port))
            if hello.port and served is not None:
                self.takeovers.reach("admitted")
        else:
            served = self._welcome(hello, side, f"host{side.other.host}")
        if served is None:
            side.close()
        else:
            self._serving[side] = served

    def answer(self, side: Side, hello: Hello) -> None:
        """Answer an end that has come before this process led."""
        self.answers(side)
        self.do(partial(self._answer, side, hello))

    def broken(self, side: Side) -> None:
        """Handle the end of one of its connections."""
        served = self._serving.pop(side, None)
        if isinstance(served, Follower):
            self.mirror.let_go(served)
        elif served is not None:
            self._broken(served, side, side.reset)

    def _said(self, line: int, message: object) -> None:
        its = self._board.lines.get(line)
        if its is not None and not isinstance(message, UNCOUNTED):
            self.takeovers.one.took(self.takeovers.end_of(its.hello.token), its.heard + 1, message)
        super()._said(line, message)

    # --- what it has for the exchange -----------------------------------------------------------------

    def _now(self) -> float:
        return self.takeovers.now_s + 7.0 * self.host + self._shift_s  # hosts' clocks differ

    def _seconds(self) -> float:
        return self.takeovers.now_s

    def _later(self, after_s: float, happen: Callable[[int], None], line: int) -> None:
        self.takeovers.cluster.later(int(after_s * 1e6), partial(self.do, partial(happen, line)))

    def _tell(self, event: Event, now: float) -> None:
        if event.kind == "deposed":
            self.takeovers.cluster.exercised[ProtocolRule.DEPOSED] += 1
        if self.takeovers.leader is self:
            self.takeovers.cluster.tell([event])

    def _claimed(self, job: JobSpec, job_id: str) -> str:
        return ""

    def _refuses(self, control: Port | None, why: str) -> None:
        self.takeovers.cluster.exercised[ProtocolRule.REFUSED_WORD] += 1

    def _expect_heartbeats(self, rank: int, line: int) -> None:
        pass

    def _is_over(self) -> bool:
        return self.over

    def _ends(self, over: bool, gone: bool) -> None:
        self.over |= over

    def _deposed(self) -> bool:
        news, self.deposed = not self.deposed, True
        if news:
            self.takeovers.cluster.later(0, partial(self.takeovers.ended, self))
        return news

    def _token(self) -> str:  # type: ignore[override]
        return f"token {self.takeovers.next_pid()}"

    def _taken(self, news: News) -> tuple[Any, Effects]:
        self.takeovers.takes(self, news)
        answer, effects = super()._taken(news)
        self.takeovers.decided(self)
        if news.kind == "goes on":
            self._again.append(effects)
        if news.kind == "stands by":
            self.takeovers.reach("term" if news.text else "alone")
        return answer, effects

    def _release(self, effects: Effects, to: Mapping[int, Port] | None = None) -> None:
        again = any(each is effects for each in self._again)
        self._again = [each for each in self._again if each is not effects]
        super()._release(effects, to)
        self.takeovers.released(self, effects, again)

    @property
    def board(self) -> Switchboard:
        return self._board


class SimulatedStandby(Process):
    """A standby's process, on the coordinator's host or ``elsewhere``."""

    def __init__(self, takeovers: Takeovers, host: int, address: tuple[str, int], elsewhere: bool) -> None:
        super().__init__(takeovers, host)
        self.elsewhere, self._address = elsewhere, address
        self.known: Known | None = None
        self._following: Following
        self._side: Side | None = None
        self._until = takeovers.now_s + 60.0
        self._turned: Turned[Side] = Turned()
        self.leads: SimulatedCoordinator | None = None
        self.connect()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.pid

    def connect(self) -> None:
        """Connect to the coordinator, once there is one."""
        if not self.alive or self.leads is not None:
            return
        side = self.takeovers.call((STANDBY, self.pid), self.host, self._address)
        if side is None and self.takeovers.now_s < self._until:
            self.takeovers.cluster.later(RETRY_US, self.connect)
        elif side is None:
            self.ends()
        else:
            self._side, self._following = side, Following(self._learn)
            self._sides.append(side)
            side.hear = lambda side, message: self.do(partial(self._follow, side, message))
            side.breaks = lambda side: self.do(partial(self._alone, side))
            side.send(Hello(-1, STANDBY, self.pid, f"host{self.host}", port=self.port * self.elsewhere))

    def _learn(self, known: Known) -> None:
        self.known = known
        self.takeovers.reach("knows elsewhere" if self.elsewhere else "knows")

    def _follow(self, side: Side, message: object) -> None:
        if side is not self._side or self.leads is not None:
            return
        if not self._following.hear(message):
            self._alone(side, wanted=False)
        elif (answer := self._following.answer()) is not None:
            side.send(answer)

    def _alone(self, side: Side, wanted: bool = True) -> None:
        if side is not self._side or self.leads is not None:
            return
        self._side = None
        side.close()
        if not self.elsewhere:
            return  # the guard decides
        self._count()
        if self.leads is not None:
            return
        if not wanted or self.known is None or self.known.board.over is not None:
            self.ends()
        else:
            self._until = self.takeovers.now_s + 60.0
            self.takeovers.cluster.later(AGAIN_US, self.connect)

    def ends(self) -> None:
        """End, since nobody wants it."""
        self._turned.send_all_back()
        self.dies()
        self.takeovers.ended(self)

    # --- those who turn to it -----------------------------------------------------------------------------

    def heard(self, side: Side, message: Any) -> None:
        """Handle an end that turns to it."""
        if self.leads is not None:
            self.leads.answer(side, message)
        elif isinstance(message, Hello):
            self._turned.add(side, message, self.known)
            self.takeovers.reach("turned")
            self._count()
            self._look_later(side)

    def _look_later(self, side: Side) -> None:
        self.takeovers.cluster.later(int(TURNED_S * SECOND), lambda: self.do(partial(self._look_at, side)))

    def _look_at(self, side: Side) -> None:
        if self.alive and self.leads is None and self._turned.send_back(side, self.known):
            self._look_later(side)

    def hangs_up(self) -> set[int]:
        """Break the connections of those that have turned to it. Return the ranks of the workers among them."""
        for side, _ in self._turned:
            side.close()
        return {hello.rank for _, hello in self._turned if hello.role == WORKER}

    def _count(self) -> None:
        if self.alive and self.known is not None and self._turned.elect(self.port, self.known):
            self.takeovers.reach("elected")
            if self.alive:
                self._lead(self.known)

    def _lead(self, known: Known) -> None:
        gone = known.board.succession.host
        known.board.moves(f"host{self.host}")
        self.leads = made = SimulatedCoordinator(self.takeovers, self.host, known.board, known)
        gone_s = self._turned.gone_s(hangs=self._side is not None)
        if self._side is not None:
            self._side.close()
        self.takeovers.moves(self, made, known)
        made.begin(gone, gone_s)
        for side, hello in self._turned:
            made.answer(side, hello)
        self.takeovers.reach("leads")
