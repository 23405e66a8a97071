"""Who may take the coordinator's place from another host, and with which workers.

The standby on the coordinator's own host hears from the guard of both that the coordinator is dead. A standby on
another host can't tell a dead coordinator from a cut line. So each side needs enough workers of the last membership to
go on:

* The standby needs more than half, which have turned to it, each for good. Only the standby may send one back, which it
  counts no more: if the coordinator was silent for a moment only, less than half have turned, and would be lost.
* The coordinator, before it goes on without the standby, needs half, which know that a new *term* has begun. A worker
  that knows a term turns to no standby of an earlier term.

Both can't have enough of the same membership. Neither side knows exactly which membership the other goes by, so each
needs enough of all possible ones (:class:`Electorate`). That takes three hosts: of two, none has more than half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from math import isfinite

from recycle_plugin.core.messages.mirroring import StandsBy
from recycle_plugin.core.vocabulary.deadlines import Deadlines, lease_s
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId

LEAST = 3  # hosts
AGAIN_S = 10.0  # how long a host may take to provide a standby before another host is asked


class Electorate:
    """The memberships, mostly one or two, that the other side may go by: as of the last message out, and newer ones."""

    def __init__(self) -> None:
        self._since: deque[tuple[int, Roster]] = deque()

    def add(self, news: int, roster: Roster) -> None:
        """Record that ``roster`` is the membership after ``news`` news."""
        if not self._since or self._since[-1][1] is not roster:
            self._since.append((news, roster))

    def out(self, news: int) -> None:
        """Record that the effects of the first ``news`` news are out: nobody goes by an earlier membership."""
        while len(self._since) > 1 and self._since[1][0] <= news:
            self._since.popleft()

    def copy(self) -> Electorate:
        """Return a copy of the present ones."""
        made = Electorate()
        made._since = deque(self._since)
        return made

    def gives(self, workers: Set[WorkerId], more: bool) -> bool:
        """Return whether ``workers`` are at least half of each membership, with ``more`` more than half."""
        shares = [(2 * len(workers & roster.workers), len(roster)) for _, roster in self._since]
        return all(have > of or (have == of and not more) for have, of in shares)


@dataclass
class Succession:
    """Who may take the place of the coordinator on ``host`` in this ``term``: the standby at ``address``, if any."""

    host: str
    term: int = 0
    address: tuple[str, int] | None = None
    _ask_at: float = 0.0
    _asked: int = 0

    def begin(self, address: tuple[str, int] | None) -> None:
        """Begin a new term."""
        self.term, self.address = self.term + 1, address

    def moves(self, host: str) -> None:
        """Record that the standby on ``host`` is now the coordinator. The old one may have begun a term without it, of
        which less than half have heard: the next term gets another number than that.
        """
        self.host, self.term, self.address, self._ask_at = host, self.term + 2, None, 0.0

    def told(self, deadlines: Deadlines) -> StandsBy:
        """Return the message that tells all others of the term."""
        silent_s = lease_s(deadlines)
        host, port = self.address or ("", 0)
        return StandsBy(self.term, host, port, silent_s if isfinite(silent_s) else 0.0)

    def wants_one(self, roster: Roster) -> bool:
        """Return whether there should be a standby on another host."""
        return len({self.host, *roster.hosts_by_rank().values()}) >= LEAST

    def asks(self, roster: Roster, now: float) -> int | None:
        """Return the rank whose supervisor is to start a standby, host by host. None if there is one or may be soon."""
        if self.address is not None or now < self._ask_at or not self.wants_one(roster):
            return None
        firsts: dict[str, int] = {}
        for rank, host in sorted(roster.hosts_by_rank().items()):
            firsts.setdefault(host, rank)
        self._ask_at = now + AGAIN_S
        others = [rank for host, rank in firsts.items() if host != self.host]
        self._asked += 1
        return others[(self._asked - 1) % len(others)]
