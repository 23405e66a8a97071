"""Slow replicas: who is named, and by what times."""

from __future__ import annotations

import pytest

from recycle_plugin.core.coordinator.facts.slowness import REPLICA_STEPS, Slowness, SlowReplica
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator import campaign
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Scenario, Trouble

STEP_US = 100_000


def roster(replicas: int, shards: int = 1) -> Roster:
    return Roster(
        tuple(
            Member(replica * shards + shard, Seat(replica, 0), f"a:{replica}.{shard}", "h", shard=shard)
            for replica in range(replicas)
            for shard in range(shards)
        )
    )


def walked(
    slow: Slowness, members: Roster, step: int, waits: list[int], own: list[int], work: list[int] | None = None
) -> list[SlowReplica]:
    """What is new after ``step``, in which each rank has waited so long in its sum, in thousandths of the step, and
    spent so much of its own.  ``work``: what each computes, as planned.
    """
    for rank, (wait, mine) in enumerate(zip(waits, own)):
        nominal = 1000 * (work[rank] if work else 50)
        time = ComputeTime(nominal, nominal, 0, wait * STEP_US // 1000, mine * STEP_US // 1000)
        slow.add(WorkerId(rank), step, time)
    slow.committed(step, members, step * STEP_US / 1e6)
    return slow.replicas_changed(members)


def test_a_replica_is_named_after_five_steps_in_a_row_and_no_more_after_five_others() -> None:
    slow, three = Slowness(watches=True), roster(3)
    late, even = ([300, 300, 0], [500, 500, 800]), ([0, 0, 0], [800, 800, 800])
    found = [walked(slow, three, step, *times) for step, times in enumerate([late] * 8 + [even] * 7, 1)]
    said = [(step, each.replica, each.over) for step, news in enumerate(found, 1) for each in news]
    assert said == [(6, 2, False), (13, 2, True)]  # of the first step nobody knows how long it took
    (named,) = found[5]
    assert named.member == three.member(named.member.worker) and named.member.rank == 2
    assert (named.behind_us, named.own_us, named.step_us) == (30_000, 30_000, STEP_US)


@pytest.mark.parametrize("times", ([300, 300, 260], [90, 90, 0]), ids=("hardly", "within a tenth"))
def test_what_is_short_beside_the_step_names_nobody(times) -> None:
    slow = Slowness(watches=True)
    assert not any(walked(slow, roster(3), step, times, [500, 500, 500]) for step in range(1, 20))


def test_now_and_then_late_is_not_slow() -> None:
    slow = Slowness(watches=True)
    times = [[300, 0] if step % 5 else [0, 0] for step in range(1, 30)]
    assert not any(walked(slow, roster(2), step, each, [500, 800]) for step, each in enumerate(times, 1))


def test_who_is_late_in_a_replica_is_told_by_its_own_time() -> None:
    """Its mates wait for it before the exchange, and all come late."""
    slow, members = Slowness(watches=True), roster(2, shards=2)
    for step in range(1, 8):
        walked(slow, members, step, [300, 310, 0, 5], [500, 500, 520, 800])
    assert slow.named[1].member.rank == 3 and slow.named[1].own_us == 30_000


def test_where_nobody_is_busier_nobody_is_named_as_late() -> None:
    slow, two = Slowness(watches=True), roster(2)
    for step in range(1, 8):
        walked(slow, two, step, [300, 0], [500, 505])
    assert slow.named[1].member is None


def test_more_work_is_not_slowness() -> None:
    slow, two = Slowness(watches=True), roster(2)
    for step in range(1, 8):
        walked(slow, two, step, [200, 0], [400, 600], [20, 40])
    assert not slow.named


def test_a_step_that_somebody_has_not_told_of_does_not_count() -> None:
    slow, two = Slowness(watches=True), roster(2)
    for step in range(1, 20):
        slow.add(WorkerId(0), step, ComputeTime(1, 1, 0, 30_000, 50_000))
        slow.add(WorkerId(1), step, ComputeTime(1, 1) if step % 2 else ComputeTime(1, 1, 0, 0, 80_000))
        slow.committed(step, two, step * STEP_US / 1e6)
        assert not slow.replicas_changed(two) or step >= 2 * REPLICA_STEPS
    assert set(slow.named) == {1}


def test_other_members_begin_anew_and_who_is_gone_is_slow_no_more() -> None:
    slow, three = Slowness(watches=True), roster(3)
    for step in range(1, 8):
        walked(slow, three, step, [300, 300, 0], [500, 500, 800])
    slow.interrupted(roster(2))
    assert not slow.named
    assert not any(walked(slow, roster(2), step, [300, 0], [500, 800]) for step in range(8, 13))


def test_where_workers_are_the_unit_nobody_is_watched() -> None:
    slow = Slowness()
    assert not any(walked(slow, roster(2), step, [300, 0], [500, 800]) for step in range(1, 10))
    assert slow.__dict__ == Slowness().__dict__


def test_it_survives_a_dump() -> None:
    slow, two = Slowness(watches=True), roster(2)
    for step in range(1, 8):
        walked(slow, two, step, [300, 0], [500, 800])
    again = load(dump(slow))
    assert again.named == slow.named


# --- in a job ---------------------------------------------------------------------------------------------


def slow_job(percent: int, replicas: int = 3, steps: int = 100, **more: object) -> Scenario:
    """A job in which seat 1.1, and whoever takes it, is slow from 300 ms on."""
    each = (5 * MILLISECOND,) * 2
    costs = CostModel(each, each, each, communication=500, reduce=each, step=(MILLISECOND,) * 2)
    troubles = [Trouble("slow", at * MILLISECOND, (Seat(1, 1),), percent=percent) for at in range(300, 20_000, 300)]
    given = {"unit": "replica", "slow": True, "troubles": tuple(troubles)} | more
    return Scenario(Topology(replicas, 2, 4), costs, Policy(), steps, **given)


def told(given: Scenario, *kinds: str) -> list[str]:
    outcome = campaign.run("x", given)
    assert not outcome.violations, outcome.violations
    lines = [line.partition(" ms  ")[2] for line in outcome.story]
    return [line for line in lines if line.partition(":")[0] in kinds]


def test_a_replica_that_stays_slow_is_named_once() -> None:
    (line,) = told(slow_job(300, steps=40), "slow_replica", "lost", "leaving")
    assert "its late worker is seat 1.1 (rank 3)" in line
