"""The throughput margin of a job, how far it is from being too slow: the fewest further losses in one stage that make
it so.
"""

from __future__ import annotations

from typing import NamedTuple

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.planner.make import plan


class Margin(NamedTuple):
    """The fewest losses that make a job too slow: ``losses`` more workers of ``stage``, 0 where it is so now.  A step
    then takes ``period_us``, None where the stage has nobody left.
    """

    losses: int
    stage: int
    period_us: int | None


def margin(view: ClusterView, costs: CostModel, policy: Policy, longest_us: int) -> Margin:
    """The margin until a step takes longer than ``longest_us``.

    Of each number of losses only those are planned that leave the most work to a live worker: a plan takes up to
    seconds in very large jobs.  Raises PlanError.
    """
    live = {stage: view.live_replicas(stage) for stage in range(view.topology.stages)}
    losses = 0
    while losses < min(map(len, live.values())):
        stage = max(live, key=lambda each: _work(costs, policy, each) / (len(live[each]) - losses))
        lost = (Seat(replica, stage) for replica in live[stage][len(live[stage]) - losses :])
        period = plan(view.without(*lost), costs, policy).period_us
        if period > longest_us:
            return Margin(losses, stage, period)
        losses += 1
    return Margin(losses, min(live, key=lambda stage: len(live[stage])), None)


def _work(costs: CostModel, policy: Policy, stage: int) -> int:
    """The microseconds of one micro-batch on ``stage``."""
    backward = (Op.I, Op.W) if policy.split_backward else (Op.B,)
    return sum(costs.of(op, stage) for op in (Op.F, *backward))
