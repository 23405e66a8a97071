"""Workers that miss something from a live one: how often they may try again, and who goes where that does not help."""

from __future__ import annotations

from typing import NamedTuple

from recycle_plugin.core.ids import Seat
from recycle_plugin.core.protocol import Missing
from recycle_plugin.core.roster import Roster, WorkerId

TRIES = 2  # to send something over a new line


class Complaint(NamedTuple):
    """``why``: in words; ``tries``: the how manieth since the last commit; ``source``: who is not heard, None for a collective of many."""

    why: str
    tries: int
    source: WorkerId | None

    @property
    def again(self) -> bool:
        return self.tries <= TRIES


class Complaints:
    """Since the last commit."""

    def __init__(self) -> None:
        self._committed = 0
        self._tries: dict[tuple[WorkerId, WorkerId] | str, int] = {}  # by who misses something from whom, or by the collective that was not finished

    def add(self, missing: Missing, roster: Roster, committed: int) -> Complaint | None:
        """``committed``: the last step that is.  None where one of the two is no member any more."""
        member = roster.member(missing.worker)
        source = roster.holder(Seat.parse(missing.source), member.shard) if member is not None and missing.source else None
        if member is None or (source is None and missing.source):
            return None
        if committed != self._committed:
            self._committed = committed
            self._tries.clear()
        key = missing.what if source is None else (member.worker, source.worker)
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        if source is None:
            return Complaint(f"{member} could not finish {missing.what}", tries, None)
        return Complaint(f"{member} misses {missing.what} from {source}", tries, source.worker)
