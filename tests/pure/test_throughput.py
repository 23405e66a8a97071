"""The throughput that the survivors of a loss are predicted to have, beside that with everybody there."""

from __future__ import annotations

from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.from_workers import Exited, Ready, SurvivorReport
from tests.support.membership import holds, job, member, step


def report(membership: Membership, generation: int, ranks: list[int], period_us: int, stepped: int = 0):
    for rank in ranks:
        out = membership.receive(
            SurvivorReport(rank, generation, stepped, "plan", holds(rank), period_us=period_us), 0.0
        )
    return out


def test_training_goes_on_with_the_throughput_that_is_predicted():
    membership = Membership(4)
    for rank in range(4):
        membership.receive(Ready(member(rank), 0, job()), 0.0)
    report(membership, 0, [0, 1, 2, 3], 1000)
    step(membership, 0, 1)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    (event,) = [event for event in report(membership, 1, [0, 1, 3], 5000, 1).events if event.kind == "resume"]
    assert event.details["throughput"] == 0.2
