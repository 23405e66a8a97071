"""How long a worker has computed in each step, and how long its plan thinks that takes."""

from __future__ import annotations

from collections import defaultdict

from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.executor import Span
from recycle_plugin.core.instruction import COMPUTE
from recycle_plugin.core.protocol import Pace


class Stopwatch:
    """``costs``: those of the stage, whoever computes."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._spent: dict[int, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, span: Span) -> None:
        one = span.instruction
        if one.op in COMPUTE:
            spent = self._spent[one.step]
            spent[0] += span.end_us - span.start_us
            spent[1] += self._costs.of(one.op, one.stage)

    def pace(self, rank: int, step: int) -> Pace:
        """Of ``step``, which has been applied."""
        spent, nominal = self._spent[step]
        self._spent = defaultdict(lambda: [0, 0], {later: value for later, value in self._spent.items() if later > step})
        return Pace(rank, step, spent, nominal)
