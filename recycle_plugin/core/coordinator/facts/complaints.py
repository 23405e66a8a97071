"""Complaints of workers that miss something from a live one: how often they may try again, and who goes if that fails.

The coordinator can't see which of the two is at fault. The worker that is not heard goes, with three exceptions:
* The complainer goes if the other is the last one of its stage and the complainer is not.
* The complainer goes if it has missed something from more workers than have missed something from the other: it is more
  likely deaf than all of them dumb.
* A worker that does not hear itself goes before anybody else: all waiting ends at it.

A collective does not tell whose connection failed. If one fails again and again the job ends. But a worker that can't
finish one collective after another goes itself.
"""

from __future__ import annotations

from typing import NamedTuple

from recycle_plugin.core.messages.from_workers import Missing
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId

TRIES = 2  # of sending over a new line


class Complaint(NamedTuple):
    """A complaint that has been weighed. ``why``: in words. ``doubted``: the worker at fault, None for a collective of
    many. ``tries``: how many complaints since the last commit count against it.
    """

    why: str
    tries: int
    doubted: WorkerId | None

    @property
    def again(self) -> bool:
        """Whether to try once more over new connections before a worker goes."""
        return self.tries <= TRIES


class Complaints:
    """The complaints since the last commit. They are few, since all regroup after each; adding one looks at all."""

    def __init__(self) -> None:
        self._committed = 0
        self._pairs: dict[tuple[WorkerId, WorkerId], int] = {}  # by (who misses something, from whom)
        self._collectives: dict[tuple[WorkerId, str], int] = {}  # by (who could not finish, which)

    def add(self, missing: Missing, roster: Roster, committed: int, holds: bool) -> Complaint | None:
        """Weigh a new complaint. ``committed``: the last committed step. ``holds``: ``missing`` is of the membership in
        force. Return None if the complaint is of an older membership, or if one of the two is no member any more. A
        worker's old complaint of not hearing itself is still recorded: it counts with the next complaint.
        """
        member = roster.member(missing.worker)
        source = _source(missing, member, roster) if member is not None and missing.source else None
        if member is None or (source is None and missing.source) or not (holds or member == source):
            return None
        if committed != self._committed:
            self._committed = committed
            self._pairs.clear()
            self._collectives.clear()
        if source is None:
            return self._of_collective(member, missing.what)
        pair = member.worker, source.worker
        self._pairs[pair] = self._pairs.get(pair, 0) + 1
        return self._weigh(member, source, missing.what, roster) if holds else None

    def _of_collective(self, member: Member, what: str) -> Complaint:
        key = member.worker, what
        self._collectives[key] = self._collectives.get(key, 0) + 1
        its = [collective for worker, collective in self._collectives if worker == member.worker]
        why = f"{member} could not finish {what}"
        if len(its) > TRIES:
            return Complaint(f"{why}, and {len(its) - 1} other collectives", len(its), member.worker)
        tries = sum(count for (_, collective), count in self._collectives.items() if collective == what)
        return Complaint(why, tries, None)

    def _weigh(self, member: Member, source: Member, what: str, roster: Roster) -> Complaint:
        """Decide who is doubted, and count how often there was reason to."""
        pairs = self._pairs
        why = f"{member} misses {what}" + f" from {source}" * (source != member)
        deaf = min((near for near, far in pairs if near == far and near in roster.workers), default=None)
        if deaf is not None:
            return Complaint(f"{why}, and {roster.member(deaf)} misses its own data", sum(pairs.values()), deaf)
        of_member = {far: tries for (near, far), tries in pairs.items() if near == member.worker}
        of_source = {near: tries for (near, far), tries in pairs.items() if far == source.worker}
        if len(of_member) > len(of_source):
            return Complaint(
                f"{why}, and has missed data from {len(of_member) - 1} more",
                sum(of_member.values()),
                member.worker,
            )
        if roster.is_last(source) and not roster.is_last(member):
            return Complaint(f"{why}, which is the last one of its stage", sum(of_source.values()), member.worker)
        return Complaint(why, sum(of_source.values()), source.worker)


def _source(missing: Missing, member: Member, roster: Roster) -> Member | None:
    try:
        return roster.holder(Seat.parse(missing.source), member.shard)
    except ValueError:  # no seat's name
        return None
