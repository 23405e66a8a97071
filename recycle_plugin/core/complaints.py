"""Workers that miss something from a live one: how often they may try again, and who goes where that does not help."""

from __future__ import annotations

from typing import Mapping, NamedTuple

from recycle_plugin.core.protocol import Member, Missing

TRIES = 2  # to send something over a new line


class Complaint(NamedTuple):
    """``why``: in words; ``tries``: the how manieth since the last commit; ``source``: the rank that is not heard, None for a collective of many."""

    why: str
    tries: int
    source: int | None

    @property
    def again(self) -> bool:
        return self.tries <= TRIES


class Complaints:
    """Since the last commit."""

    def __init__(self) -> None:
        self._tries: dict[tuple[int, int] | str, int] = {}  # by who misses something from whom, or by the collective that was not finished

    def add(self, missing: Missing, members: Mapping[int, Member]) -> Complaint | None:
        """None where one of the two is no member any more."""
        member = members.get(missing.rank)
        source = next((rank for rank, other in members.items() if str(other.seat) == missing.source), None)
        if member is None or (source is None and missing.source):
            return None
        key = missing.what if source is None else (member.rank, source)
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        if source is None:
            return Complaint(f"seat {member.seat} could not finish {missing.what}", tries, None)
        return Complaint(f"seat {member.seat} misses {missing.what} from seat {missing.source}", tries, source)

    def committed(self) -> None:
        self._tries.clear()
