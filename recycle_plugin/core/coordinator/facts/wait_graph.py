"""The wait graph: which worker waits for which other worker, and for what, by the last heartbeats. It explains
standstills.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from recycle_plugin.core.coordinator.facts.failure_detector import FailureDetector
from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.vocabulary.roster import Group, Member, Roster

NAMED = 8  # members named in a line


class Edge(NamedTuple):
    """An edge: the members ``who`` wait for what ``whom`` have to give, or are ``doing`` something else, for at most
    ``for_s`` seconds.
    """

    who: Group
    doing: Activity
    whom: Group
    for_s: float

    def __str__(self) -> str:
        doing = (
            f"{'wait' if len(self.who) > 1 else 'waits'} for {str(self.doing) or 'something'}"
            if self.doing.at == WAITS
            else f"{self.doing.at} {self.doing}".rstrip()
        )
        missing = f", which {named(self.whom)} {'have' if len(self.whom) > 1 else 'has'} not reached"
        return (
            f"{named(self.who)} {doing} for {self.for_s:.1f} s{missing * (self.doing.seat is None and self.whom != ())}"
        )


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
    found: dict[Activity, tuple[list[Member], list[float]]] = {}
    for member in roster:
        doing, for_s = failure_detector.doing(member.worker)
        members, times = found.setdefault(doing, ([], []))
        members.append(member)
        times.append(for_s)
    return [
        Edge(tuple(members), doing, _whom(doing, members, roster), max(times))
        for doing, (members, times) in found.items()
    ]


def _whom(doing: Activity, who: list[Member], roster: Roster) -> Group:
    """Return the members that ``who`` wait for. A worker that hears no other worker may miss its own data."""
    if doing.at != WAITS:
        return ()
    named = roster.group(doing.seat) if doing.seat is not None else roster.of_ranks(frozenset(doing.ranks))
    others = tuple(member for member in named or roster if member not in who)
    return others or named


def shown(edges: list[Edge]) -> str:
    """Return the edges in words, in one line."""
    return "; ".join(map(str, edges))


def records(edges: list[Edge]) -> list[dict[str, Any]]:
    """Return the edges as data, for the run folder."""
    return [
        {
            "who": [str(member.seat) for member in edge.who],
            "at": edge.doing.at,
            "what": str(edge.doing),
            "whom": [str(member.seat) for member in edge.whom],
            "for_s": round(edge.for_s, 3),
        }
        for edge in edges
    ]
