"""Who may take the coordinator's place from another host, and with whom.

Who stands by on the coordinator's own host hears from their guard that the coordinator is dead.  A process on another
host can't tell that from a cut line.  So whoever goes on needs enough workers of the last membership on its side:

* that process more than half of them, which have turned to it, each for good;
* the coordinator, before it goes on without that process, half of them, which know so: a new *term* has begun, and who
  knows of it turns to nobody who stood by in an earlier one.

Both can't have enough of one membership.  Which one the other side goes by, neither knows exactly, so each needs enough
of all that it may be (:class:`Electorate`).  That takes three hosts: of two, none has more than half.
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
AGAIN_S = 10.0  # how long a host that was asked for such a process may take, before another one is asked


class Electorate:
    """The memberships that whoever else may go on with the job may go by: from the one in force when the last word of
    the coordinator's went out, to the newest.  They are one or two, mostly.
    """

    def __init__(self) -> None:
        self._since: deque[tuple[int, Roster]] = deque()

    def add(self, news: int, roster: Roster) -> None:
        """With so many ``news``, this is the membership."""
        if not self._since or self._since[-1][1] is not roster:
            self._since.append((news, roster))

    def out(self, news: int) -> None:
        """What has followed from so many ``news`` is out, so nobody goes by what was before."""
        while len(self._since) > 1 and self._since[1][0] <= news:
            self._since.popleft()

    def copy(self) -> Electorate:
        """Those of now."""
        made = Electorate()
        made._since = deque(self._since)
        return made

    def gives(self, workers: Set[WorkerId], more: bool) -> bool:
        """Whether ``workers`` are half of each membership, or ``more``."""
        shares = [(2 * len(workers & roster.workers), len(roster)) for _, roster in self._since]
        return all(have > of or (have == of and not more) for have, of in shares)


@dataclass
class Succession:
    """Who may take the place of the coordinator on ``host``: since the last ``term`` began, a process at ``address``,
    or nobody elsewhere.
    """

    host: str
    term: int = 0
    address: tuple[str, int] | None = None
    _ask_at: float = 0.0
    _asked: int = 0

    def begin(self, address: tuple[str, int] | None) -> None:
        """Begin a new term."""
        self.term, self.address = self.term + 1, address

    def moves(self, host: str) -> None:
        """Who stood by elsewhere, on ``host``, is the coordinator now.  The one before may have begun a term without
        it, of which not half have heard: the next one is another than that.
        """
        self.host, self.term, self.address, self._ask_at = host, self.term + 2, None, 0.0

    def told(self, deadlines: Deadlines) -> StandsBy:
        """What all others are told of the term."""
        silent_s = lease_s(deadlines)
        host, port = self.address or ("", 0)
        return StandsBy(self.term, host, port, silent_s if isfinite(silent_s) else 0.0)

    def wants_one(self, roster: Roster) -> bool:
        """Whether somebody is to stand by elsewhere."""
        return len({self.host, *roster.hosts_by_rank().values()}) >= LEAST

    def asks(self, roster: Roster, now: float) -> int | None:
        """The rank whose supervisor is to have a process started that stands by: of one host after the other, until one
        does.  None where there is one, or may be soon.
        """
        if self.address is not None or now < self._ask_at or not self.wants_one(roster):
            return None
        firsts: dict[str, int] = {}
        for rank, host in sorted(roster.hosts_by_rank().items()):
            firsts.setdefault(host, rank)
        self._ask_at = now + AGAIN_S
        others = [rank for host, rank in firsts.items() if host != self.host]
        self._asked += 1
        return others[(self._asked - 1) % len(others)]
