"""How often the processes of a large job speak to the one that hears them all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.coordinator.facts.failure_detector import FailureDetector
from recycle_plugin.core.coordinator.facts.output import SUPERVISORS, SupervisorOf
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.messages.from_coordinator import Pace
from recycle_plugin.core.messages.from_workers import Heartbeat, Ready
from recycle_plugin.core.vocabulary.deadlines import (
    HEARD_A_SECOND,
    SUPERVISOR_BEAT_S,
    TICK_S,
    WORKER_BEAT_S,
    Deadlines,
    paced_s,
)
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member, WorkerId
from tests.support.membership import job


@given(st.integers(1, 100_000), st.floats(2.0, 600.0))
def test_a_silent_host_is_told_from_a_rare_heartbeat(ranks, timeout_s):
    every_s = paced_s(SUPERVISOR_BEAT_S, ranks, replace(Deadlines(), heartbeat_timeout_s=timeout_s))
    assert every_s == SUPERVISOR_BEAT_S or every_s <= timeout_s / 5
    assert every_s >= SUPERVISOR_BEAT_S and (every_s >= timeout_s / 5 or ranks / every_s <= HEARD_A_SECOND + 1e-6)


@pytest.mark.parametrize("ranks", (4, 1000, 2000))
def test_a_standstill_is_seen_however_rarely_each_worker_speaks(ranks):
    """In a large job each heartbeat is older than in a small one when the next comes; it still says that all wait."""
    deadlines = Deadlines(heartbeat_timeout_s=15.0, progress_timeout_s=20.0)
    detector = FailureDetector(deadlines, ranks=ranks)
    workers = [WorkerId(rank) for rank in range(ranks)]
    detector.admit(workers)
    every = round(paced_s(WORKER_BEAT_S, ranks, deadlines) / TICK_S)
    for tick in range(round(30.0 / TICK_S)):
        for worker in workers[tick % every :: every]:
            detector.heartbeat(Heartbeat(worker.rank, tick, 1, Activity(WAITS, "a tensor")))
        detector.tick(tick * TICK_S)
    assert detector.standstill_s > 20.0 and all(detector.doing(worker)[0].at == WAITS for worker in workers)


@pytest.mark.parametrize(("replicas", "every_s"), [(128, 0.5), (512, 2.0)])
def test_supervisors_of_a_large_job_are_told_to_speak_less_often(replicas, every_s):
    """One that comes later, or again, too; and all how long to wait for the coordinator."""
    membership = Membership(2 * replicas)
    seats = [Seat(replica, stage) for replica in range(replicas) for stage in (0, 1)]
    assert membership.supervisor(0, True, 0.0).messages == []
    of_all = job(replicas=replicas, heartbeat_timeout_s=15.0)
    for rank, seat in enumerate(seats):
        last = membership.receive(Ready(Member(rank, seat, "a", "h"), 0, of_all), 0.0)
    pace = Pace(every_s, 120.0)
    assert [one for whom, one in last.messages if whom == SUPERVISORS and isinstance(one, Pace)] == [pace]
    assert membership.supervisor(3, True, 1.0).messages == [(SupervisorOf(3), pace)]
