"""Slow replicas: which of them hold the exchange between replicas up, and who in them is late.

Every step ends in sums over the replicas, for which each worker waits until its counterparts have come: who holds the
same shard of the same stage in the other replicas.  Each says how long its sum took.  Who comes last waits least, so
the difference is how much later it came, and no clocks of two hosts are compared.

* A seat comes when the last of its workers does.  A replica is *behind* by what its seat came later than the median of
  its stage's seats, in the stage where that is most.  Where that was more than a tenth of the step for five steps in
  a row the replica is slow, and where it was not for five steps in a row it is so no longer.  What a changing
  membership takes is no step of these.
* All workers of a replica come late where one of them is, since they wait for each other.  So the one who is *late* is
  found by its own time: what it has spent, since the step before, waiting for nobody.  It is the one whose own time
  is most above its counterparts'.  Where that is hardly so of anybody, it is what they send each other that is slow.
* Who has more micro-batches than its counterparts is not slow for that: what these take at the pace of the quickest of
  them counts for nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.messages.from_workers import ComputeTime
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId

LATE = 0.1  # of a step
STEPS = 5


@dataclass(frozen=True)
class Lateness:
    """How late a replica was in a step, which took ``step_us``: ``behind_us`` the median of the others; ``own_us``: of
    its workers' own times, how much each is above its counterparts'.
    """

    step_us: int
    behind_us: int
    own_us: Mapping[WorkerId, int]

    @property
    def late(self) -> bool:
        """Whether that was long enough to count."""
        return self.behind_us > LATE * self.step_us


@dataclass(frozen=True)
class SlowReplica:
    """A replica that holds the exchange up: means over the last steps, in microseconds.  ``member``: who in it is
    late, by ``own_us`` of its own time, None where nobody is; ``over``: the replica is slow no longer.
    """

    replica: int
    member: Member | None
    behind_us: int
    own_us: int
    step_us: int
    over: bool = False

    def tell(self, out: CoordinatorOutput) -> None:
        details = {
            "replica": self.replica,
            "seat": str(self.member.seat) if self.member is not None else None,
            "rank": self.member.rank if self.member is not None else None,
            "behind_us": self.behind_us,
            "own_us": self.own_us,
            "step_us": self.step_us,
            "over": self.over,
        }
        text = f"replica {self.replica} holds the exchange between replicas up no more"
        if not self.over:
            who = (
                f"late in it is {self.member}, busy for {self.own_us / 1000:.0f} ms longer than its counterparts"
                if self.member is not None
                else "none of its workers is busy for longer than its counterparts: what they send each other is slow"
            )
            text = (
                f"replica {self.replica} holds the exchange between replicas up: it comes "
                f"{self.behind_us / 1000:.0f} ms after the others, in steps of {self.step_us / 1000:.0f} ms; {who}"
            )
        out.say("slow_replica", text, **details)


class SlowReplicas:
    """The slow replicas of a job.  ``watches``: it has any to look for.  ``named``: those that count as slow."""

    def __init__(self, watches: bool = False) -> None:
        self._watches = watches
        self.named: dict[int, SlowReplica] = {}
        self._said: dict[int, dict[WorkerId, ComputeTime]] = {}
        self._recent: dict[int, deque[Lateness]] = {}  # by replica
        self._committed_at: float | None = None

    def add(self, message: ComputeTime) -> None:
        """Takes in how long a worker's sum took, if that is known."""
        if self._watches and message.exchange_us is not None and message.own_us is not None:
            self._said.setdefault(message.step, {})[message.worker] = message

    def committed(self, step: int, roster: Roster, now: float) -> None:
        """Compares the replicas in ``step``, which is committed ``now``, in seconds, if all that are at work have said
        what it took them.  Costs time in proportion to the members, times the logarithm of the replicas.
        """
        if not self._watches:
            return
        told = {older: self._said.pop(older) for older in sorted(self._said) if older <= step}
        took_us = round((now - self._committed_at) * 1e6) if self._committed_at is not None else 0
        self._committed_at = now
        stages = counterparts(roster, told.get(step, {}))
        if took_us > 0 and stages:
            for replica, lateness in compared(stages, took_us).items():
                self._recent.setdefault(replica, deque(maxlen=STEPS)).append(lateness)

    def interrupted(self, roster: Roster) -> None:
        """Begins to count anew, since the members are those of ``roster`` from now on."""
        self._recent.clear()
        self._committed_at = None
        there = {seat.replica for seat in roster.working}
        self.named = {replica: slow for replica, slow in self.named.items() if replica in there}

    def news(self, roster: Roster) -> list[SlowReplica]:
        """The replicas that have become slow, and those that are so no longer, with the steps counted so far."""
        found = []
        for replica, recent in sorted(self._recent.items()):
            late = [lateness.late for lateness in recent]
            if len(late) == STEPS and (not any(late) if replica in self.named else all(late)):
                found.append(self._summed_up(replica, roster))
        for each in found:
            if each.over:
                del self.named[each.replica]
            else:
                self.named[each.replica] = each
        return found

    def _summed_up(self, replica: int, roster: Roster) -> SlowReplica:
        recent = self._recent[replica]
        behind, step = (round(fmean(getattr(each, name) for each in recent)) for name in ("behind_us", "step_us"))
        own = {worker: round(fmean(each.own_us[worker] for each in recent)) for worker in recent[-1].own_us}
        latest = max(sorted(own), key=lambda worker: own[worker])
        member = roster.member(latest) if own[latest] > LATE * behind else None
        over = not any(each.late for each in recent)
        return SlowReplica(replica, member, behind, own[latest], step, over)


class Took(NamedTuple):
    """What a step took a ``worker``: its sum, and its own time, in microseconds; for as many micro-batches as its
    counterparts have.
    """

    worker: WorkerId
    sum_us: int
    own_us: int


Counterparts = Mapping[int, Took]  # by replica


def counterparts(roster: Roster, told: Mapping[WorkerId, ComputeTime]) -> list[list[Counterparts]]:
    """What those have ``told`` who wait for each other, by stage and shard, of the replicas that are at work; nothing
    where one of them has not, or there is but one replica.  Costs a pass over the members.
    """
    stages = []
    for stage in roster.live_stages:
        shards = []
        for shard in range(roster.shards):
            there = roster.working_peers(stage, shard)
            if len(there) < 2 or any(member.worker not in told for member in there.values()):
                return []
            shards.append(_evened({replica: told[member.worker] for replica, member in there.items()}))
        stages.append(shards)
    return stages


def _evened(group: Mapping[int, ComputeTime]) -> Counterparts:
    """What it would have taken those of ``group`` to do as much as the one with the least work."""
    least = min(time.nominal_us for time in group.values())
    pace = min((time.spent_us / time.nominal_us for time in group.values() if time.nominal_us), default=0.0)
    more = {replica: round((time.nominal_us - least) * pace) for replica, time in group.items()}
    return {
        replica: Took(time.worker, (time.exchange_us or 0) + more[replica], (time.own_us or 0) - more[replica])
        for replica, time in group.items()
    }


def compared(stages: Sequence[Sequence[Counterparts]], step_us: int) -> dict[int, Lateness]:
    """How late each replica was in a step that took ``step_us``: as the stage where it was most so, of which the seat
    comes when the last of its workers does.  Costs time in proportion to the workers, times the logarithm of the
    replicas.
    """
    behind: Counter[int] = Counter(dict.fromkeys(stages[0][0], 0))
    own: dict[int, dict[WorkerId, int]] = {replica: {} for replica in behind}
    for shards in stages:
        waited = {replica: min(group[replica].sum_us for group in shards) for replica in behind}
        ordered = sorted(waited.values())
        for replica, mine in waited.items():
            behind[replica] = max(behind[replica], _of_others(ordered, mine, -(-len(ordered) // 2)) - mine)
        for group in shards:
            owns = sorted(took.own_us for took in group.values())
            for replica, took in group.items():
                own[replica][took.worker] = took.own_us - _of_others(owns, took.own_us, len(owns) // 2)
    return {replica: Lateness(step_us, behind[replica], own[replica]) for replica in behind}


def _of_others(values: Sequence[int], one: int, number: int) -> int:
    """The ``number``-th smallest, from 1, of sorted ``values`` without ``one`` of them."""
    return values[number - 1] if values[number - 1] < one else values[number]
