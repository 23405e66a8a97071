"""What becomes of slow replicas: they are said to the user, and by ``slow: drop`` taken offline where that pays.

* A replica goes as in a planned leave, at a commit and without lost work, where the others' steps are predicted to be
  a tenth faster without it than they are measured to be with it (core/coordinator/slow_replicas.py).
* One goes at a time, while all members are at work and nobody leaves, and only if a replica is left that is not slow.
* It is started again once the others have committed 20 steps without it, the second time 40, then 80, and so on; as
  often in all as ``rejoin`` says for starts in a row.  After that it stays away until an operator admits it.  So a
  replica that stays slow is dropped a few times in a job and not in a loop, and costs less each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator import departures
from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.coordinator.restarts import starts_in_a_row
from recycle_plugin.core.coordinator.slow_replicas import WORTH, SlowReplica, load_without
from recycle_plugin.core.messages.from_workers import Leaving

if TYPE_CHECKING:
    from recycle_plugin.core.coordinator.course import Course

DROP = "drop"
AWAY_STEPS = 20


@dataclass
class Drops:
    """How often a replica of ``ranks`` was taken offline: ``times``, and behind which step it is ``due`` to be started
    again; None where it is not.
    """

    ranks: tuple[int, ...]
    times: int = 0
    due: int | None = None


def see(course: Course, out: CoordinatorOutput) -> list[SlowReplica]:
    """Says which replicas have become slow, and which are so no longer; returns those that it would pay to go on
    without, the slowest first.
    """
    slow_replicas = course.steps.slow_replicas
    for slow in slow_replicas.news(course.roster):
        _say(slow, out)
    measured = [slow_replicas.measured(replica, course.roster) for replica in sorted(slow_replicas.named)]
    found = [slow for slow in measured if slow is not None and pays(slow, load(course))]
    return sorted(found, key=lambda slow: slow.without_us)


def load(course: Course) -> float:
    """By what the time for each sample grows, holdups aside, where one more replica goes."""
    assert course.job is not None, "a job that trains has begun"
    live = len({seat.replica for seat in course.roster.working})
    return load_without(course.job, course.attendance.micro_batches, live)


def pays(slow: SlowReplica, load: float) -> bool:
    """Whether the others are predicted to be faster without a replica by enough to be worth it."""
    return slow.step_without_us(load) * WORTH < slow.step_us


def drop(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Takes the slowest replica offline for which that pays, where the job asks for that and may go on so."""
    candidates = see(course, out)
    if not candidates or course.job is None or course.job.slow != DROP or not _may_go(course):
        return
    slow = candidates[0]
    members = course.roster.replica(slow.replica)
    drops = course.drops.setdefault(slow.replica, Drops(tuple(member.rank for member in members)))
    drops.times += 1
    again = drops.times <= starts_in_a_row(course.job.rejoin)
    drops.due = course.committed + AWAY_STEPS * 2 ** (drops.times - 1) if again else None
    without_us = slow.step_without_us(load(course))
    per = "a step's samples take" if course.job.policy.shrinks else "a step takes"
    then = (
        f"it is started again after step {drops.due}"
        if again
        else f"it stays away until recycle admit {members[0].seat}"
    )
    out.say(
        "replica_dropped",
        f"replica {slow.replica} goes offline, since it is slow: with it {per} {slow.step_us / 1000:.0f} ms, without "
        f"it {without_us / 1000:.0f} ms are predicted; {then}",
        replica=slow.replica,
        step_us=slow.step_us,
        without_us=without_us,
        times=drops.times,
        due=drops.due,
    )
    why = f"replica {slow.replica} is slow"
    departures.leave(course, [Leaving(each.rank, why, incarnation=each.incarnation) for each in members], now, out)


def bring_back(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Has replicas started again that were taken offline long enough ago.  Costs one look at each of these."""
    for replica, drops in course.drops.items():
        if drops.due is None or course.committed < drops.due or course.is_ending:
            continue
        vacancies = course.vacancies
        if not all(map(vacancies.is_vacant, drops.ranks)):
            continue
        drops.due = None
        if not any(map(vacancies.is_filled, drops.ranks)):
            how = "; ".join(dict.fromkeys(vacancies.admit(rank, now, out) for rank in drops.ranks))
            out.say(
                "replica_admitted", f"replica {replica}, which was slow, may take part again: {how}", replica=replica
            )


def _may_go(course: Course) -> bool:
    """Whether a replica may go now."""
    busy = course.halted or course.regrouping.under_way or course.attendance.leaving or course.ending.finishing
    if busy or course.is_ending:
        return False
    there = {seat.replica for seat in course.roster.working}
    return bool(there - course.steps.slow_replicas.named.keys())


def _say(slow: SlowReplica, out: CoordinatorOutput) -> None:
    details = {
        "replica": slow.replica,
        "seat": str(slow.member.seat) if slow.member is not None else None,
        "rank": slow.member.rank if slow.member is not None else None,
        "behind_us": slow.behind_us,
        "own_us": slow.own_us,
        "step_us": slow.step_us,
        "over": slow.over,
    }
    text = f"replica {slow.replica} holds the exchange between replicas up no more"
    if not slow.over:
        who = (
            f"late in it is {slow.member}, busy for {slow.own_us / 1000:.0f} ms longer than its counterparts"
            if slow.member is not None
            else "none of its workers is busy for longer than its counterparts, so what they send each other is slow"
        )
        text = (
            f"replica {slow.replica} holds the exchange between replicas up: it comes {slow.behind_us / 1000:.0f} ms "
            f"after the others, in steps of {slow.step_us / 1000:.0f} ms; {who}"
        )
    out.say("slow_replica", text, **details)
