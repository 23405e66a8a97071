"""A weight that several stages share: its gradient over all of them, from each stage's sum.

The lowest live worker of each stage brings its stage's sum. They are added in stage order, each element once and alike
for all. So all copies of the weight get the same bits, whichever workers are alive (core/vocabulary/topology.py).
"""

from __future__ import annotations

import torch
from torch import nn

from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.runtime.stage.block_sums import SumGroup, fixed_order_sum


class TiedWeight:
    """A weight that all of ``stages`` have a copy of; ``parameter`` is this worker's. ``name``: of all copies;
    ``group``: all workers of the stages.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, stages: tuple[int, ...], group: SumGroup, view: ControlView
    ) -> None:
        self.name, self.parameter, self.stages = name, parameter, stages
        self._group, self._view = group, view

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradient over the stages; ``own``: this stage's, only read. A collective of all live
        workers of the stages.
        """
        bring = self._bring()
        flat = own.reshape(-1)
        mine = dict.fromkeys(bring[self._group.live_position()[0]], flat)
        return fixed_order_sum(mine, bring, torch.empty_like(flat), self._group).view_as(own)

    def _bring(self) -> list[list[int]]:
        """Return, for each live worker of the group in its order, the stages whose sum it brings."""
        roster = self._view.roster
        return [[member.seat.chunk] * (member == roster.alike(member)[0]) for member in roster.stages(self.stages)]
