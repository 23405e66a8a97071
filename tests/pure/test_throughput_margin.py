"""How many more losses make a job too slow, by the planner."""

from __future__ import annotations

import pytest

from recycle_plugin import planner
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology

SHAPE, POLICY = Topology(4, 2, 6), Policy()
COSTS = CostModel.uniform(2, 1000, 1000, 1000)


def period(*lost: Seat, costs: CostModel = COSTS) -> int:
    return planner.plan(SHAPE.full().without(*lost), costs, POLICY).period_us


@pytest.mark.parametrize("share, losses", [(1.2, 1), (1.9, 2), (2.1, 3)])
def test_the_fewest_losses_of_one_stage(share, losses):
    longest = int(period() * share)
    found = planner.margin(SHAPE.full(), COSTS, POLICY, longest)
    assert found.losses == losses and found.period_us > longest
    fewer = [Seat(replica, found.stage) for replica in range(losses - 1)]
    assert period(*fewer) <= longest


def test_a_hole_brings_its_stage_nearer():
    view = SHAPE.full().without(Seat(2, 1))
    assert planner.margin(view, COSTS, POLICY, int(1.9 * period()))[:2] == (1, 1)


def test_the_stage_with_the_most_work_counts():
    costs = CostModel((1000, 2000), (1000, 2000), (1000, 2000))
    assert planner.margin(SHAPE.full(), costs, POLICY, int(1.2 * period(costs=costs))).stage == 1


def test_a_stage_may_be_empty_before_the_job_is_too_slow():
    view = SHAPE.full().without(Seat(0, 0), Seat(1, 0))
    assert planner.margin(view, COSTS, POLICY, 100 * period()) == (2, 0, None)


def test_a_job_that_is_too_slow_now_has_no_margin():
    assert planner.margin(SHAPE.full().without(Seat(0, 0)), COSTS, POLICY, period()).losses == 0
