"""Slow workers and slow replicas, by the times that workers report of their steps.

A *seat* is slow by its compute time, compared within its stage. Its *relative time* is the time of its F, I, W and B of
a step over what the cost model expects of just these. It does not depend on the amount of work, so taking work off a
slow worker does not make it look fast. An announced level changes only if the relative time was more than 30% away from
it for three steps in a row, in the same direction. So noise around any level, also around the one at which a worker
counts as slow, changes nothing. By default it must then stay away for half a minute: only a lasting difference is worth
another order of sums.

A *replica* is slow if it holds up the exchange between replicas. Every step ends in sums over the replicas. Each worker
waits there for its counterparts, the holders of the same shard of the same stage in other replicas, and reports how
long its sum took. The last one to come waits least. So differences of waits are differences of arrival, and no clocks
of two hosts are compared.

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
from statistics import fmean, median, median_low
from typing import NamedTuple

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Group, Member, Roster, WorkerId

WIDTH = 1.3
LIKE_OTHERS = 1.1  # the relative time below which a slow seat is so no longer
SEAT_STEPS = 3
PATIENCE_S = 30.0  # by default, from there on
GRAIN = 10  # percent: plans for 200 and for 203 would be the same
LATE = 0.1  # of a step
REPLICA_STEPS = 5


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


class Slowness:
    """The slow workers and replicas of a job. ``rebalances``: seats are compared, for plans; ``watches``: replicas are,
    for the user. ``patience_s``: how long a seat must have left its level. ``percent``: announced slow seats, their
    time in percent of the usual one. ``named``: the replicas that count as slow.
    """

    def __init__(self, rebalances: bool = False, watches: bool = False, patience_s: float = 0.0) -> None:
        self.rebalances, self._watches, self._patience_s = rebalances, watches, patience_s
        self.percent: dict[Seat, int] = {}
        self.named: dict[int, SlowReplica] = {}
        self._told: dict[int, dict[WorkerId, ComputeTime]] = {}
        self._relative: dict[Seat, deque[float]] = {}
        self._left_at: dict[Seat, float] = {}  # when a seat was first seen away from its announced level
        self._lateness: dict[int, deque[Lateness]] = {}  # by replica
        self.compared = False  # seats, since the last call of seats_changed()
        self._committed_at: float | None = None

    @classmethod
    def of(cls, job: JobSpec) -> Slowness:
        """Return what ``job`` compares. By default seats are compared only if others may take a seat's work."""
        watches, able = job.unit == "replica", job.unit == "worker" and job.policy.reroute
        if job.rebalance == "lasting":
            return cls(able, watches, PATIENCE_S)
        return cls(bool(job.rebalance), watches)

    def add(self, worker: WorkerId, step: int, time: ComputeTime) -> None:
        """Record the time that ``step`` took on a worker."""
        if self.rebalances or self._watches:
            self._told.setdefault(step, {})[worker] = time

    def committed(self, step: int, roster: Roster, now: float) -> None:
        """Compare the times up to ``step``, committed at ``now`` (s), which all members have sent. O(members *
        log(replicas)).
        """
        told = {older: self._told.pop(older) for older in sorted(self._told) if older <= step}
        if self.rebalances and told:
            self.compared = True
            for times in told.values():
                for stage in roster.live_stages:
                    self._compare(_by_seat(times, roster.stage(stage)))
            for seat in (self.percent.keys() | self._relative.keys()) - roster.seats:
                for known in (self.percent, self._relative, self._left_at):
                    known.pop(seat, None)
        if self._watches:
            took_us = round((now - self._committed_at) * 1e6) if self._committed_at is not None else 0
            self._committed_at = now
            stages = counterparts(roster, told.get(step, {}))
            for replica, lateness in compared(stages, took_us).items() if took_us > 0 and stages else ():
                self._lateness.setdefault(replica, deque(maxlen=REPLICA_STEPS)).append(lateness)

    def _compare(self, measured: Mapping[Seat, float]) -> None:
        if len(measured) > 1:
            # the faster of two: the other may be slow, and nobody is fast by mistake
            usual = median_low(measured.values())
            for seat, relative in measured.items():
                self._relative.setdefault(seat, deque(maxlen=SEAT_STEPS)).append(max(1.0, relative / usual))

    def interrupted(self, roster: Roster) -> None:
        """Count the lateness of replicas anew with the members of ``roster``. Compute times stay comparable."""
        self._lateness.clear()
        self._committed_at = None
        there = {seat.replica for seat in roster.working}
        self.named = {replica: slow for replica, slow in self.named.items() if replica in there}

    def seats_changed(self, now: float) -> dict[Seat, int]:
        """Return the seats that by ``now`` (s) have left their announced compute time, with the new one in percent, and
        announce it. O(seats).
        """
        self.compared, found = False, dict[Seat, int]()
        for seat, recent in sorted(self._relative.items()):
            known = self.percent.get(seat, 100)
            left = min(recent) > known / 100 * WIDTH or max(recent) < max(known / 100 / WIDTH, LIKE_OTHERS)
            if len(recent) < SEAT_STEPS or not left:
                self._left_at.pop(seat, None)
            elif now - self._left_at.setdefault(seat, now) >= self._patience_s:
                percent = round(100 * median(recent) / GRAIN) * GRAIN if median(recent) > WIDTH else 100
                if percent != known:
                    found[seat] = percent
        self.percent = {seat: percent for seat, percent in {**self.percent, **found}.items() if percent != 100}
        return found

    def replicas_changed(self, roster: Roster) -> list[SlowReplica]:
        """Return the replicas that have become slow, and those that are slow no longer, and record them as such."""
        found = []
        for replica, recent in sorted(self._lateness.items()):
            late = [lateness.late for lateness in recent]
            if len(late) == REPLICA_STEPS and (not any(late) if replica in self.named else all(late)):
                found.append(self._summed_up(replica, roster))
        for each in found:
            if each.over:
                del self.named[each.replica]
            else:
                self.named[each.replica] = each
        return found

    def _summed_up(self, replica: int, roster: Roster) -> SlowReplica:
        recent = self._lateness[replica]
        behind, step = (round(fmean(getattr(each, name) for each in recent)) for name in ("behind_us", "step_us"))
        own = {worker: round(fmean(each.own_us[worker] for each in recent)) for worker in recent[-1].own_us}
        latest = max(sorted(own), key=lambda worker: own[worker])
        member = roster.member(latest) if own[latest] > LATE * behind else None
        over = not any(each.late for each in recent)
        return SlowReplica(replica, member, behind, own[latest], step, over)


def _by_seat(times: Mapping[WorkerId, ComputeTime], members: Group) -> dict[Seat, float]:
    """Return by seat its slowest shard's compute time over the planned one; the other shards wait for that shard."""
    slowest: dict[Seat, float] = {}
    for member in members:
        time = times.get(member.worker)
        if time is not None and time.spent_us and time.nominal_us:
            slowest[member.seat] = max(slowest.get(member.seat, 0.0), time.spent_us / time.nominal_us)
    return slowest


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
            times = [told.get(member.worker) for member in there.values()]
            if len(there) < 2 or any(time is None or None in (time.exchange_us, time.own_us) for time in times):
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
