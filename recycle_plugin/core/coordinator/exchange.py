"""A coordinator without clock, sockets and tasks: who comes over which connection, what is taken in, and what goes out.

The switchboard makes all decisions. A standby (core/coordinator/mirror.py) takes in all that this process does, and
nothing goes out before it has: so it can go on from there if this process dies. The coordinator's server
(runtime/control/coordinator.py), and a simulated one whose clock and lines the campaign makes, add the rest.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.coordinator.lines import Effects
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.mirror import Known, Mirror, Port
from recycle_plugin.core.coordinator.switchboard import NEWS, WORKER, News, Switchboard
from recycle_plugin.core.messages.from_coordinator import Refused
from recycle_plugin.core.messages.from_workers import Exited, Hello, Ready
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.mirroring import Turns
from recycle_plugin.core.vocabulary.roster import WorkerId

TOKEN = 16  # bytes of the secret with which a connection's other end goes on
WATCHED_S = 1.0  # how long a worker whose connection was reset may be without a supervisor
BACK_S = 60.0  # how long connections' other ends may take to come to a new coordinator
DEPOSED = (
    "fewer than half of the last membership's workers can be reached, and a standby on another host may go on with the "
    "others: this coordinator ends, and with it each worker that can't reach the standby"
)


class Exchange:
    """The connections of a coordinator with the state ``board``. ``known``: what is known of a dead coordinator from
    which this one goes on. Subclasses have its clock and its connections.
    """

    def __init__(self, board: Switchboard, known: Known | None = None) -> None:
        self._board = board
        self._shift_s = 0.0  # added to the clock: in this state that of another process goes on
        if known is not None and known.now:
            self._shift_s = known.now - self._now()
        self._heard: dict[int, Port] = {}  # by line: where it is heard
        self._away: set[int] = set()  # lines whose other ends break them and come again
        self._absences, self._absent = 0, dict[int, int]()  # how many there were; by line, the number of its last one
        self._reset: dict[int, int] = {}  # rank by line: workers that are away since their connections were reset
        self._told: dict[int, Port] = {}  # by line: where it is told
        self._closing = False
        self.mirror = Mirror(
            board, self._release, self._begin_term, self._depose, self._is_over, self._seconds, known=known
        )

    # --- what a server has --------------------------------------------------------------------------

    def _now(self) -> float:
        """Return the time of the job, in seconds: it does not go on while this process is stopped."""
        raise NotImplementedError

    def _seconds(self) -> float:
        """Return the seconds since some moment. They do not go back, nor on while this process is stopped."""
        raise NotImplementedError

    def _later(self, after_s: float, happen: Callable[[int], None], line: int) -> None:
        raise NotImplementedError

    def _tell(self, event: Event, now: float) -> None:
        """Tell the user."""
        raise NotImplementedError

    def _claimed(self, job: JobSpec, job_id: str) -> str:
        """Claim the job's folders. Return why that can't be, or ""."""
        raise NotImplementedError

    def _refuses(self, control: Port | None, why: str) -> None:
        raise NotImplementedError

    def _expect_heartbeats(self, rank: int, line: int) -> None:
        raise NotImplementedError

    def _is_over(self) -> bool:
        """Return whether the job is over and all were told so."""
        raise NotImplementedError

    def _ends(self, over: bool, gone: bool) -> None:
        """Handle that the job is ``over``, and that everybody is ``gone``."""
        raise NotImplementedError

    def _deposed(self) -> bool:
        """End, since the others may go on without this coordinator. Return whether that is news."""
        raise NotImplementedError

    # --- connections ----------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        return self._board.membership

    def _goes_on(self, gone: str = "", gone_s: float = 0.0) -> None:
        """Wait for the other ends of a dead coordinator's connections: for ``gone_s`` on host ``gone``, if any."""
        for number, line in self._board.lines.items():
            back_s = gone_s if gone and line.hello.host == gone else BACK_S
            self._later(back_s, self._see_whether_back, number)

    def _follows(self) -> None:
        """Go on as a former standby on the coordinator's host."""
        if self._board.succession.term:  # unknown: whether enough workers know of the last term
            self.mirror.go_on_alone()

    def _welcome(self, hello: Hello, control: Port, who: str) -> int | None:
        """Return the number of the connection of ``hello``, in words ``who``; None for a worker that is left behind."""
        if hello.line >= 0:
            if self._board.succession.term:  # its answer may have to wait until enough workers know of the term
                control.send(self._board.term_told)
            there, effects = self._taken(News("goes on", self._now(), hello=hello))
            if there:
                self._attach(hello.line, control, effects)
                return hello.line
            if hello.role == WORKER:
                control.send(Refused("the others have gone on without it"))
                return None
        hello = replace(hello, line=-1, token=self._token())
        opened, effects = self._taken(News("opened", self._now(), hello=hello, text=who))
        self._attach(line := int(opened), control, effects)
        return line

    @staticmethod
    def _token() -> str:
        return secrets.token_hex(TOKEN)

    def _attach(self, line: int, control: Port, effects: Effects) -> None:
        before, self._heard[line] = self._heard.get(line), control
        self._reset.pop(line, None)
        if before is not None:
            before.close()

        def attach() -> None:
            self._told[line] = control

        self.mirror.then(effects, attach)

    def _said(self, line: int, message: object) -> None:
        if isinstance(message, Turns):
            self._away.add(line)
            return
        if isinstance(message, Ready) and not self.membership.started and not self._board.claimed:
            why = self._claimed(message.job, self._board.job_id)
            self._take("unclaimed" if why else "claimed", text=why or message.job.run_dir)
        if isinstance(message, Exited):
            self._close_reset(message.worker)
        self._take("said", line, message=message)

    def _broken(self, line: int, control: Port, reset: bool = False) -> None:
        """Handle a broken connection. Its other end may stay away for a while if it has said that it comes again. So
        may a worker whose connection was ``reset``, by the network or by a kernel that gave it up, as long as its
        supervisor is here or comes again soon: that one reports its end.
        """
        if self._heard.get(line) is not control:
            return
        its, said = self._board.lines.get(line), line in self._away
        rank = -1 if its is None else its.rank
        del self._heard[line]
        if said or (reset and its is not None and self._board.may_live(its.worker)):
            self._away.discard(line)
            self._absences += 1
            if not said:
                self._reset[line] = rank
                self._later(WATCHED_S, self._see_whether_watched, line)
            self._absent[line] = self._absences
            self._later(BACK_S, partial(self._see_whether_back, absence=self._absences), line)
        else:
            self._take("closed", line)
            for each in [each for each, its_rank in self._reset.items() if its_rank == rank]:
                self._later(WATCHED_S, self._see_whether_watched, each)

    def _close_reset(self, worker: WorkerId) -> None:
        """Take the connections of ``worker`` that were reset for broken: its process has ended. A pass over them."""
        its = [line for line in self._reset if (at := self._board.lines.get(line)) and at.worker == worker]
        for line in its:
            del self._reset[line]
            self._take("closed", line)

    def _see_whether_watched(self, line: int) -> None:
        """Take a worker whose connection was reset for dead if nobody would report its end."""
        if line in self._reset and not self._board.is_watched(line):
            del self._reset[line]
            self._take("closed", line)

    def _see_whether_back(self, line: int, absence: int = 0) -> None:
        """Treat a connection as broken if its other end is not back. After another ``absence`` it may still come."""
        if self._absent.get(line, 0) == absence and line not in self._heard:
            self._reset.pop(line, None)
            self._take("closed", line)

    def _begin_term(self, address: str) -> None:
        """Tell all of a new term, at once if it has no standby elsewhere: then also those that have come again and wait
        for an answer until enough workers know.
        """
        if self._closing or self._is_over():
            return
        effects = self._taken(News("stands by", self._now(), text=address))[1]
        self.mirror.then(effects) if address else self._release(effects, self._told | self._heard)

    def _depose(self) -> None:
        if self._deposed():
            said = {"term": self._board.succession.term, "host": self._board.succession.host}
            self._tell(Event("deposed", DEPOSED, said), self._now())

    # --- news -------------------------------------------------------------------------------------------

    def fail(self, text: str) -> None:
        """End the job as failed for everybody; ``text`` is the line that all get."""
        self._take("failed", text=text)

    def terminate(self, reason: str) -> None:
        """End the job at the next commit, as a supervisor that gets SIGTERM would; ``reason`` is for the user."""
        self._take("terminated", text=reason)

    def _take(self, kind: str, line: int = -1, message: object = None, text: str = "") -> None:
        if not self._closing:
            self.mirror.then(self._taken(News(kind, self._now(), line, None, message, text))[1])

    def _taken(self, news: News) -> tuple[Any, Effects]:
        """Return the switchboard's answer to ``news``, and the effects, which each standby has to know of first."""
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

    def _release(self, effects: Effects, to: Mapping[int, Port] | None = None) -> None:
        """Send out ``effects``, over the connections ``to``."""
        to = self._told if to is None else to
        for line, frame in effects.frames:
            if (control := to.get(line)) is not None:
                control.send(frame)
        for event in effects.events:
            self._tell(event, self._now())
        for line, why in effects.refused:
            self._refuses(self._told.get(line), why)
        for rank, line in effects.expected:
            self._expect_heartbeats(rank, line)
        for line in effects.closed:
            self._heard.pop(line, None)
            if (control := self._told.pop(line, None)) is not None:
                control.close()
        gone = (effects.ended or self._board.over is not None) and not self._board.awaited
        if effects.over or gone:
            self._ends(effects.over, gone)

    def _pass_time(self) -> None:
        """Let time pass; to be called every ``core.vocabulary.deadlines.TICK_S``."""
        self.mirror.see_late()
        if not self.mirror.holds_up:
            self._take("tick")
