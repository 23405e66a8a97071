"""The end of a connection to the coordinator: how it goes on with another process in the coordinator's place, by what
both ends have counted (core/messages/kept.py), and where it turns when it is broken (core/coordinator/succession.py).

No clock, threads or sockets: real connections (runtime/control/framed.py) and simulated ones share these rules.
"""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.messages.from_coordinator import FirstGeneration, Generation, GenerationChange, Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.generation_forms import whole
from recycle_plugin.core.messages.kept import UNCOUNTED, Heard, Kept
from recycle_plugin.core.messages.mirroring import Got, Knows, SentBack, StandsBy, Turns
from recycle_plugin.core.vocabulary.deadlines import LATE_S, TICK_S

AT_HOME_S = 1.5  # seconds for which the old address alone is tried, before a standby on another host is
# The same if the host is silent. A process that dies closes its connections, so none takes its place there; but the
# line may heal. With the lease, this is heartbeat_timeout_s.
HEALS_S = LATE_S + TICK_S
TRY_S = 1.0  # seconds for each of the two in turn after that
HEALING_TRY_S = 0.25  # seconds for each try of a silent host: what is lost of a call is sent again after 1 s only
APART = 2  # times the silence after which the coordinator is taken for dead: others find so later
NOBODY = StandsBy(0, "", 0, 0.0)
OF_GENERATIONS = (FirstGeneration, GenerationChange, Generation)


class LineEnd:
    """One end of a connection: ``line`` (-1 before the Welcome), the messages sent and received, the term."""

    def __init__(self) -> None:
        self.line, self._token = -1, ""  # and what proves that it is this end's
        self._kept, self._heard = Kept(), Heard()
        self._term = self._stood_by = NOBODY  # the last that it knows of; the last with a standby elsewhere
        self._generation: Generation | None = None  # the last heard

    def send(self, message: object) -> object:
        """Send a message; implementations do."""
        raise NotImplementedError

    def _keep(self, message: object, frame: bytes) -> None:
        if self.line >= 0 and not isinstance(message, UNCOUNTED):
            self._kept.add(frame)

    def _again(self, hello: Hello, silent: bool = False) -> Hello:
        """Return the ``hello`` that continues this connection. ``silent``: nothing comes from the other end's host."""
        mine = replace(hello, line=self.line, heard=self._heard.count, token=self._token)
        return replace(mine, term=self._term.term, silent=silent)

    def _since(self, welcome: Welcome) -> list[bytes]:
        """Go on with the connection that ``welcome`` answers for; return the frames to send once more."""
        if welcome.line != self.line:  # a new connection
            self.line, self._token, self._kept, self._heard = welcome.line, welcome.token, Kept(), Heard()
            self._generation = None
        self._got(welcome.heard)
        return self._kept.since(welcome.heard)

    def _got(self, count: int) -> None:
        self._kept.got(count)

    def _whole(self, message: object) -> object:
        """Return ``message`` in its whole form: of a generation only the changes are sent, and of the first one the
        part that this end needs. An Unreadable if the changes are to another generation than the last received.
        """
        if type(message) not in OF_GENERATIONS:
            return message
        if isinstance(message, FirstGeneration):
            message = whole(message)
        if isinstance(message, GenerationChange):
            message = message.behind(self._generation)
        if isinstance(message, Generation):
            self._generation = message
        return message

    def _is_news(self, message: object) -> bool:
        """Record how far either end is, if this end was welcomed; return whether ``message`` says more than that."""
        if isinstance(message, Welcome) and self.line < 0:
            self.line, self._token = message.line, message.token
        if self.line < 0:
            return True
        if isinstance(message, StandsBy):
            self._learn(message)
            return False
        if isinstance(message, Got):
            self._got(message.count)
            return False
        if not isinstance(message, UNCOUNTED) and self._heard.is_due(message):
            self.send(Got(self._heard.count))
        return True

    def _learn(self, term: StandsBy) -> None:
        """Record a term and its standby, and confirm it."""
        if (answer := self._noted(term)) is not None:
            self.send(answer)

    def _noted(self, term: StandsBy) -> Knows | None:
        """Record a term and return the answer; None for a term before the last."""
        if term.term < self._term.term:
            return None
        self._term = term
        self._stood_by = term if term.host else self._stood_by
        return Knows(term.term)

    def _last_word(self) -> Turns | None:
        """Return what is sent before this end breaks a silent connection; None if it keeps it, without a standby."""
        return Turns(self._term.term) if self._term.host else None

    def _elsewhere(self, role: str, address: tuple[str, int]) -> tuple[str, int] | None:
        """Return the address of a standby on another host than ``address``'s. For an end that is no worker, which
        decides nothing by turning, it may also be the last standby: that one may coordinate by now.
        """
        its = self._stood_by if role != "worker" and not self._term.host else self._term
        there = its.host, its.port
        return None if not its.host or self.line < 0 or there == address else there

    def _has_turned(self) -> None:
        """Forget the standby: the coordinator to which this end has turned will name its own."""
        self._term = replace(self._term, host="", port=0)


class Tries:
    """The tries to connect again since ``began`` (s): at the same address, then there and ``elsewhere`` in turn.
    ``silent``: nothing came from the host of that address. ``decides``: this end is a worker's, which by turning helps
    to decide who coordinates.
    """

    def __init__(
        self,
        began: float,
        timeout_s: float,
        elsewhere: bool,
        silent_s: float,
        silent: bool = False,
        decides: bool = True,
    ) -> None:
        self._alone_until, self._alone_s = (
            began + (HEALS_S if silent else AT_HOME_S),
            HEALING_TRY_S if silent else TRY_S,
        )
        self.goes_elsewhere, self._decides = False, decides
        self.until = began + timeout_s + (APART * silent_s if elsewhere else 0.0)  # others may come there later

    def next(self, now: float, elsewhere: bool) -> bool:
        """Return whether the next try goes elsewhere, if there is such an address by now."""
        self.goes_elsewhere = elsewhere and not self.goes_elsewhere and now >= self._alone_until
        return self.goes_elsewhere

    def lasts_s(self, now: float) -> float:
        """Return the seconds for a try that begins ``now``, if there are two addresses: at the first one it ends when
        the other one's turn comes.
        """
        left_s = self._alone_until - now
        return min(self._alone_s, left_s) if left_s > 0.0 else TRY_S

    def are_over(self, answer: object | None) -> bool:
        """Return whether a try that has come through, with an ``answer`` or without, is the last: it was refused, or
        there is no way back for a worker, unless the standby itself sends it back (core/coordinator/succession.py).
        """
        no_way_back = self.goes_elsewhere and self._decides
        return not isinstance(answer, SentBack) and (answer is not None or no_way_back)
