"""The wait graph: who waits for what from whom, by the workers' last heartbeats. It explains standstills."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from recycle_plugin.core.coordinator.facts.failure_detector import FailureDetector
from recycle_plugin.core.messages.activity import LONGEST, WAITS
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Group, Member, Roster

NAMED = 8  # members named in a line
_FROM = re.compile(r".* from seat (\d+\.\d+)(, once more)?")

_AMONG = re.compile(r" among ranks (\d+(?:, \d+)*)")


class Edge(NamedTuple):
    """An edge: the members ``who`` wait for ``what`` of ``whom``, or are ``at`` something else, for at most ``for_s``
    seconds.
    """

    who: Group
    at: str
    what: str
    whom: Group
    for_s: float

    def __str__(self) -> str:
        doing = (
            f"{'wait' if len(self.who) > 1 else 'waits'} for {self.what or 'something'}"
            if self.at == WAITS
            else f"{self.at} {self.what}".rstrip()
        )
        missing = (
            ""
            if self.at != WAITS or _FROM.fullmatch(self.what)
            else f", which {named(self.whom)} {'have' if len(self.whom) > 1 else 'has'} not reached"
        )
        return f"{named(self.who)} {doing} for {self.for_s:.1f} s{missing if self.whom else ''}"


def named(members: Group) -> str:
    """Return the seats of ``members`` with their ranks, in words; of many only the first."""
    names = [f"{member.seat} (rank {member.rank})" for member in members[:NAMED]]
    more = [f"{len(members) - NAMED} more"] if len(members) > NAMED else []
    return f"seat{'s' * (len(members) > 1)} {', '.join(names + more)}"


def wait_graph(roster: Roster, failure_detector: FailureDetector) -> list[Edge]:
    """Return the edges of the wait graph, one for all members that do the same, in the order of the roster. An edge
    from A to B for each datum that A awaits from B. A worker at a barrier has an edge to every member that has not
    arrived. O(members * edges).
    """
    doing: dict[tuple[str, str], list[Member]] = {}
    longest: dict[tuple[str, str], float] = {}
    for member in roster:
        at, what, for_s = failure_detector.doing(member.worker)
        doing.setdefault((at, what), []).append(member)
        longest[at, what] = max(for_s, longest.get((at, what), 0.0))
    return [
        Edge(tuple(who), at, what, _whom(at, what, who, roster), longest[at, what]) for (at, what), who in doing.items()
    ]


def _whom(at: str, what: str, who: list[Member], roster: Roster) -> Group:
    if at != WAITS:
        return ()
    if source := _FROM.fullmatch(what):
        return roster.group(Seat.parse(source[1]))
    there = {member.worker for member in who}
    return tuple(member for member in roster if member.worker not in there and _is_to_come(member, what))


def _is_to_come(member: Member, what: str) -> bool:
    """Return whether ``member`` is to come; not if the whole name of a collective's group is known, and lacks it."""
    group = _AMONG.search(what)
    return group is None or len(what) >= LONGEST or str(member.rank) in group[1].split(", ")


def shown(edges: list[Edge]) -> str:
    """Return the edges in words, in one line."""
    return "; ".join(map(str, edges))


def records(edges: list[Edge]) -> list[dict[str, Any]]:
    """Return the edges as data, for the run folder."""
    return [
        {
            "who": [str(member.seat) for member in edge.who],
            "at": edge.at,
            "what": edge.what,
            "whom": [str(member.seat) for member in edge.whom],
            "for_s": round(edge.for_s, 3),
        }
        for edge in edges
    ]
