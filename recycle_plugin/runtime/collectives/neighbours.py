"""Pairs of workers with a link for boundary tensors over NCCL (runtime/collectives/pairs.py). Imports no torch."""

from __future__ import annotations

from collections import Counter

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member, Roster

MOST_ENDS = 16  # of links, per worker
END_BYTES = 41 << 20  # of device memory that an end takes; measured on one H200, at two CTAs


def wanted(roster: Roster) -> list[tuple[Member, Member]]:
    """Return the (sender, receiver) pairs, in the order in which all members make their links.

    Neighbours in one replica come first. In place of a lost worker, any worker of its stage may take its work. Pairs
    beyond MOST_ENDS at either worker are left out. Costs a pass over the members per lost seat, and sorting the pairs.
    """
    stages = {member.seat.stage for member in roster}
    replicas = sorted({member.seat.replica for member in roster})

    def hosts(replica: int, stage: int) -> tuple[Member, ...]:
        return roster.group(Seat(replica, stage)) or tuple(each for each in roster if each.seat.stage == stage)

    found: set[tuple[Member, Member]] = set()
    for stage in stages & {each - 1 for each in stages}:
        for replica in replicas:
            for one in hosts(replica, stage):
                for other in hosts(replica, stage + 1):
                    if one.shard == other.shard:  # others send each other nothing
                        found |= {(one, other), (other, one)}
    kept, ends = [], Counter[Member]()
    for pair in sorted(
        found, key=lambda pair: (pair[0].seat.replica != pair[1].seat.replica, pair[0].rank, pair[1].rank)
    ):
        if all(ends[end] < MOST_ENDS for end in pair):
            ends.update(pair)
            kept.append(pair)
    return kept


def ends(roster: Roster) -> int:
    """Return the largest number of link ends at one member."""
    counted = Counter(member for pair in wanted(roster) for member in pair)
    return max(counted.values(), default=0)
