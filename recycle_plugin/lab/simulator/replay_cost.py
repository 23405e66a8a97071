"""What a replay costs in a simulated job that logs: ``recycle doctor``'s time of a replay (planner/log_line.py), shared
with the helpers that the plugin would ask, who get the stage's weights for each step and send back their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.log_boundaries import groups
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.stage_bytes import StageBytes
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.lab.planner.profile import Wire
from recycle_plugin.planner.log_line import expected


@dataclass(frozen=True)
class SimulatedLog:
    """The log of all boundaries, with a checkpoint ``every`` so many steps. ``memory``: of each stage, () if it is not
    known: then nothing is loaded, read or sent. ``wire``: between a replaying worker and its helpers.
    """

    every: int
    costs: CostModel
    policy: Policy
    memory: Sequence[StageBytes]
    wire: Wire

    def replay_s(self, left: ClusterView, steps: int) -> float:
        """Return the seconds to load a checkpoint and replay ``steps`` steps of the empty stages of ``left``."""
        shape, (first, *more) = left.topology, left.empty_stages()
        blocks = self.policy.blocks(shape)
        helpers, busiest = blocks.shared(0 if more or shape.tie(first) else len(left.live), None)
        line = expected(self.costs, self.memory, self.policy.split_backward, busiest, ("",) * shape.stages, self.every)
        logged = [each for each in range(shape.stages - 1) if not {each, each + 1} <= {first, *more}]
        together = [group for group in groups(logged, shape.stages) if group[0] in (first, *more)]
        sent = [size for each in self.memory[first : first + 1] for size in (each.weights, each.gradient)]
        help_s = steps * helpers * sum(map(self.wire.transfer_us, sent)) / 1e6
        return max(line.replay_s(*group, steps) for group in together) + help_s
