"""The end of a connection to the coordinator that may go on with another process in its place, by what both ends have
counted (core/messages/kept.py), and where it turns when it is broken (core/coordinator/succession.py).

No clock, threads or sockets: real connections (runtime/control/framed.py) and simulated ones share these rules.
"""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.messages.from_coordinator import Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.kept import UNCOUNTED, Heard, Kept
from recycle_plugin.core.messages.mirroring import Got, Knows, StandsBy, Turns

AT_HOME_S = 1.5  # how long who listened where the connection led is tried, before who stands by elsewhere is
TRY_S = 1.0  # and then each of them in turn
APART = 2  # times the silence after which the coordinator is taken for dead: others find so later
NOBODY = StandsBy(0, "", 0, 0.0)


class LineEnd:
    """What an end knows of its connection: its number at the coordinator (``line``, -1 before that has welcomed it),
    what was sent and heard over it, and the last term.
    """

    def __init__(self) -> None:
        self.line, self._token = -1, ""  # and what shows that it is this end's
        self._kept, self._heard = Kept(), Heard()
        self._term = self._stood_by = NOBODY  # the last that it knows of; the last in which somebody stood by elsewhere

    def send(self, message: object) -> object:
        """Send a message; implementations do."""
        raise NotImplementedError

    def _keep(self, message: object, frame: bytes) -> None:
        if self.line >= 0 and not isinstance(message, UNCOUNTED):
            self._kept.add(frame)

    def _again(self, hello: Hello) -> Hello:
        """The ``hello`` of who comes again."""
        return replace(hello, line=self.line, heard=self._heard.count, token=self._token, term=self._term.term)

    def _since(self, welcome: Welcome) -> list[bytes]:
        """Go on with the connection that ``welcome`` answers for; the frames to be sent once more."""
        if welcome.line != self.line:  # another one than before
            self.line, self._token, self._kept, self._heard = welcome.line, welcome.token, Kept(), Heard()
        self._got(welcome.heard)
        return self._kept.since(welcome.heard)

    def _got(self, count: int) -> None:
        self._kept.got(count)

    def _is_news(self, message: object) -> bool:
        """Take note of how far either end is, at the end that was welcomed; whether that was not all of ``message``."""
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
        """Take note of a term, and of who stands by in it, and say so."""
        if (answer := self._noted(term)) is not None:
            self.send(answer)

    def _noted(self, term: StandsBy) -> Knows | None:
        """The answer to a term, once it is noted; None to one before the last."""
        if term.term < self._term.term:
            return None
        self._term = term
        self._stood_by = term if term.host else self._stood_by
        return Knows(term.term)

    def _last_word(self) -> Turns | None:
        """What is said before this end breaks a connection over which it hears nothing; None where it does not break
        it, since nobody stands by elsewhere.
        """
        return Turns(self._term.term) if self._term.host else None

    def _elsewhere(self, role: str, address: tuple[str, int]) -> tuple[str, int] | None:
        """Where somebody stands by on another host than that of ``address``.  For who is no worker, and decides nothing
        by turning there, it may also be the last one that did: that one may coordinate by now.
        """
        its = self._stood_by if role != "worker" and not self._term.host else self._term
        there = its.host, its.port
        return None if not its.host or self.line < 0 or there == address else there

    def _has_turned(self) -> None:
        """Who stands by for the coordinator to which this end has turned, that will say."""
        self._term = replace(self._term, host="", port=0)


class Tries:
    """The tries to make a connection again, one after the other, since ``began``, by any clock in seconds: at the same
    address for a while, then there and ``elsewhere`` in turn.
    """

    def __init__(self, began: float, timeout_s: float, elsewhere: bool, silent_s: float) -> None:
        self._began, self.goes_elsewhere = began, False
        self.until = began + timeout_s + (APART * silent_s if elsewhere else 0.0)  # others may come there later

    def next(self, now: float, elsewhere: bool) -> bool:
        """Whether the next try goes elsewhere, where there is such a place by now."""
        self.goes_elsewhere = elsewhere and not self.goes_elsewhere and now >= self._began + AT_HOME_S
        return self.goes_elsewhere

    def are_over(self, answer: object | None) -> bool:
        """Whether no other follows one that has come through, with an ``answer`` or without: it was refused, or there
        is no way back (core/coordinator/succession.py).
        """
        return answer is not None or self.goes_elsewhere
