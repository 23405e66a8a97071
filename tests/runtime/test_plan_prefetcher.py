"""The plan prefetcher: the same plans, sooner, and nobody waits for it."""

from __future__ import annotations

import threading

from recycle_plugin import planner
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.runtime.worker.plan_prefetcher import PlanPrefetcher

SHAPE, COSTS, POLICY = Topology(3, 2, 4), CostModel.uniform(2, 10, 11, 9, 1), Policy()


def members(view) -> list[Member]:
    return [Member(rank, seat, "", f"host{seat.replica}") for rank, seat in enumerate(sorted(view.live))]


def planned() -> None:
    for thread in threading.enumerate():
        if thread.name == "recycle: plan prefetcher":
            thread.join(60)
            assert not thread.is_alive()


def test_every_single_loss_and_every_host_is_in_store_and_as_on_demand() -> None:
    prefetcher, view = PlanPrefetcher(COSTS, POLICY), SHAPE.full()
    assert prefetcher.plan(view).digest == planner.plan(view, COSTS, POLICY).digest
    prefetcher.prepare(view, members(view))
    planned()
    for lost in [[seat] for seat in SHAPE.seats] + [[Seat(replica, 0), Seat(replica, 1)] for replica in range(3)]:
        after = view.without(*lost)
        assert after in prefetcher.store
        assert prefetcher.plan(after).digest == planner.plan(after, COSTS, POLICY).digest


def test_a_failure_does_not_wait_for_what_is_being_planned() -> None:
    prefetcher, view = PlanPrefetcher(COSTS, POLICY), SHAPE.full()
    with prefetcher._lock:  # as the thread has it while it plans
        assert prefetcher.plan(view).digest == planner.plan(view, COSTS, POLICY).digest
    assert view not in prefetcher.store


def test_what_was_begun_for_an_older_membership_is_left() -> None:
    prefetcher, old, new = PlanPrefetcher(COSTS, POLICY), SHAPE.full(), SHAPE.full().without(Seat(1, 1))
    prefetcher.prepare(old, members(old))
    prefetcher.prepare(new, members(new))
    planned()
    assert new.without(Seat(0, 1)) in prefetcher.store and new.without(Seat(2, 0)) in prefetcher.store
