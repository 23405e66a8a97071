"""The stopwatch of a worker: how long it has computed in each step, and how long its plan thinks that takes; how long
its sum with the other replicas took, and for how long it has waited for nobody.

All by its own clock, so that clocks of different hosts are never compared.
"""

from __future__ import annotations

from collections import defaultdict

from recycle_plugin.core.messages.from_workers import ComputeTime
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.loop_ports import StepProgram


class Stopwatch:
    """A count of the microseconds that a worker computes in each step.  ``costs``: those of the stage, whoever
    computes.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._spent: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        self._meant: dict[int, frozenset[Instruction]] = {}
        self._done: dict[int, set[Instruction]] = defaultdict(set)
        self._exchanged: dict[int, int | None] = {}  # by step, what its sum took; None: it was interrupted
        self._since: tuple[int, int] | None = None  # the clock at the last step, and what had been waited by then

    def begin(self, program: StepProgram) -> None:
        """Notes that ``program`` is run next.

        The first of a step says what was meant to be computed here; a later one is of recovery.

        Nothing of the step before the last one will be run again: it is committed (core/vocabulary/commit_rule.py).
        """
        for kept in (self._meant, self._done):
            for old in [step for step in kept if step < program.step - 1]:
                del kept[old]
        self._meant.setdefault(program.step, frozenset(program.instructions))
        if program.resumed:
            self._exchanged[program.step] = None

    def add(self, span: Span) -> None:
        """Counts the time of an instruction that has run, if it computes."""
        one, took = span.instruction, span.end_us - span.start_us
        if one.op in COMPUTE:
            spent, done = self._spent[one.step], self._done[one.step]
            spent[0] += took
            spent[1] += self._costs.of(one.op, one.stage)
            spent[2] += took if one in done or one not in self._meant[one.step] else 0
            done.add(one)

    def exchanged(self, step: int, took_us: int) -> None:
        """Counts what the sum of ``step`` with the other replicas took."""
        self._exchanged.setdefault(step, took_us)

    def compute_time(self, rank: int, step: int, now_us: int, waited_us: int) -> ComputeTime:
        """The message that says how long ``step``, which has been applied, was computed on here; the count is
        dropped.  ``now_us``: the clock; ``waited_us``: how long this worker has waited for others so far.
        """
        exchange, since = self._exchanged.pop(step, None), self._since
        self._since = now_us, waited_us
        own = None
        if exchange is not None and since is not None:
            own = max(0, now_us - since[0] - (waited_us - since[1]))
        spent, nominal, again = self._spent.pop(step, (0, 0, 0))
        return ComputeTime(rank, step, spent, nominal, again, exchange, own)
