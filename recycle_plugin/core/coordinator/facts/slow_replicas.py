"""Slow replicas: which replicas hold up the exchange between replicas, and which worker in them is late.

Every step ends in sums over the replicas. Each worker waits there for its counterparts, the holders of the same shard
of the same stage in other replicas, and reports how long its sum took. The last one to come waits least. So differences
of waits are differences of arrival, and no clocks of two hosts are compared.

* A seat comes when the last of its shards does. A replica is *behind* by how much later its seat came than the median
  of the stage's other seats, in the stage where that is most. It becomes slow after five steps in a row in which it was
  behind by more than a tenth of the step, and is slow no longer after five steps in a row in which it was not. Steps
  during a change of membership do not count.
* One late worker makes all of its replica late, since they wait for each other. So the *late* one is found by its own
  time, which is the time since the step before in which it waited for nobody. The late worker is the one whose own time
  exceeds its counterparts' most. If the excess is small for all, the transfers between the replica's workers are slow.
* More micro-batches than the counterparts' do not make a worker slow: their time, at the pace of the quickest
  counterpart, is taken off.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId

LATE = 0.1  # of a step
STEPS = 5


@dataclass(frozen=True)
class Lateness:
    """How late a replica was in a step that took ``step_us``: ``behind_us`` after the median of the others. ``own_us``:
    by how much each worker's own time exceeds its counterparts'. Microseconds.
    """

    step_us: int
    behind_us: int
    own_us: Mapping[WorkerId, int]

    @property
    def late(self) -> bool:
        """Whether the replica was late enough to count."""
        return self.behind_us > LATE * self.step_us


@dataclass(frozen=True)
class SlowReplica:
    """A replica that holds the exchange up; means over the last steps, in microseconds. ``member``: the late worker, by
    ``own_us`` of its own time, or None. ``over``: the replica is slow no longer.
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
        text = f"replica {self.replica} no longer delays the exchange between replicas"
        if not self.over:
            who = (
                f"its late worker is {self.member}, busy for {self.own_us / 1000:.0f} ms longer than its counterparts"
                if self.member is not None
                else "none of its workers is busy for longer than its counterparts: transfers between them are slow"
            )
            text = (
                f"replica {self.replica} delays the exchange between replicas: it comes "
                f"{self.behind_us / 1000:.0f} ms after the others, in steps of {self.step_us / 1000:.0f} ms; {who}"
            )
        out.say("slow_replica", text, **details)


class SlowReplicas:
    """The slow replicas of a job. ``watches``: the job has replicas to compare. ``named``: those that count as slow."""

    def __init__(self, watches: bool = False) -> None:
        self._watches = watches
        self.named: dict[int, SlowReplica] = {}
        self._said: dict[int, dict[WorkerId, ComputeTime]] = {}
        self._recent: dict[int, deque[Lateness]] = {}  # by replica
        self._committed_at: float | None = None

    def add(self, worker: WorkerId, step: int, time: ComputeTime) -> None:
        """Record how long a worker's sum took, if that is known."""
        if self._watches and time.exchange_us is not None and time.own_us is not None:
            self._said.setdefault(step, {})[worker] = time

    def committed(self, step: int, roster: Roster, now: float) -> None:
        """Compare the replicas in ``step``, committed at ``now`` (s), if all times are known. O(members *
        log(replicas)).
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
        """Count anew with the members of ``roster``."""
        self._recent.clear()
        self._committed_at = None
        there = {seat.replica for seat in roster.working}
        self.named = {replica: slow for replica, slow in self.named.items() if replica in there}

    def news(self, roster: Roster) -> list[SlowReplica]:
        """Return the replicas that have become slow, and those that are slow no longer, and record them as such."""
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
    """A worker's sum and own time in a step, in us, as if all counterparts had equally many micro-batches."""

    worker: WorkerId
    sum_us: int
    own_us: int


Counterparts = Mapping[int, Took]  # by replica


def counterparts(roster: Roster, told: Mapping[WorkerId, ComputeTime]) -> list[list[Counterparts]]:
    """Return the times by stage, shard and replica; [] if one is missing, or with only one replica. O(members)."""
    stages = []
    for stage in roster.live_stages:
        shards = []
        for shard in range(roster.shards):
            there = roster.working_peers(stage, shard)
            if len(there) < 2 or any(member.worker not in told for member in there.values()):
                return []
            shards.append(_evened({replica: (one.worker, told[one.worker]) for replica, one in there.items()}))
        stages.append(shards)
    return stages


def _evened(group: Mapping[int, tuple[WorkerId, ComputeTime]]) -> Counterparts:
    """Return the times that ``group`` would have taken with the work of the one that has the least."""
    least = min(time.nominal_us for _, time in group.values())
    pace = min((time.spent_us / time.nominal_us for _, time in group.values() if time.nominal_us), default=0.0)
    evened = {}
    for replica, (worker, time) in group.items():
        more = round((time.nominal_us - least) * pace)
        evened[replica] = Took(worker, (time.exchange_us or 0) + more, (time.own_us or 0) - more)
    return evened


def compared(stages: Sequence[Sequence[Counterparts]], step_us: int) -> dict[int, Lateness]:
    """Return how late each replica was, in the stage where it was latest. O(workers * log(replicas))."""
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
    """Return the ``number``-th smallest, from 1, of sorted ``values`` without one entry of the value ``one``."""
    return values[number - 1] if values[number - 1] < one else values[number]
