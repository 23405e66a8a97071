"""The stopwatch of a worker: the time that it computes in each step, the planned time, the time of its sum with the
other replicas, and the rest without waits. All times are by its own clock: hosts' clocks are never compared.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction, Op
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.core.worker.machine import Machine
from recycle_plugin.core.worker.observer import Observer


class Stopwatch(Observer):
    """A count of the microseconds that a worker computes in each step, by its ``clock``.  ``costs``: of each stage,
    whoever computes for it.
    """

    def __init__(self, costs: CostModel, clock: Machine) -> None:
        self._costs, self._clock = costs, clock
        self._taken: dict[int, ComputeTime] = {}  # of the last applied step, until it is reported
        self._spent: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        self._meant: dict[int, set[Instruction]] = {}  # to be run here, and not run yet
        self._exchanged: dict[int, int | None] = {}  # by step, what its sum took; None: it was interrupted
        self._since: tuple[int, int] | None = None  # the clock at the last step, and the time waited by then

    def begins(self, program: StepProgram) -> None:
        """Record that ``program`` runs next. The first program of a step is the planned work; a later program of the
        same step is recovery. Nothing of the step before the last one will run again: that step is committed
        (core/vocabulary/commit_rule.py).
        """
        for old in [step for step in self._meant if step < program.step - 1]:
            del self._meant[old]
        self._meant.setdefault(program.step, set(program.instructions))
        if program.resumed:
            self._exchanged[program.step] = None

    def ran(self, span: Span) -> None:
        """Count the time of an instruction that has run, if it computes for a step."""
        one, took = span.instruction, span.end_us - span.start_us
        if one.op in COMPUTE and one.step > 0:
            spent, meant = self._spent[one.step], self._meant[one.step]
            spent[0] += took
            spent[1] += self._costs.of(one.op, one.stage)
            try:
                meant.remove(one)
            except KeyError:
                spent[2] += took

    def summed(self, instruction: Instruction, took_us: int) -> None:
        """Record the time of the step's sum with the other replicas."""
        if instruction.op is Op.REDUCE:
            self._exchanged.setdefault(instruction.step, took_us)

    def applied(self, step: int, norm: Any) -> None:
        """Sum up the time of ``step``, for :meth:`time_of`, and drop the count."""
        now_us, waited_us = self._clock.now_us(), self._clock.waited_us()
        exchange, since = self._exchanged.pop(step, None), self._since
        self._since = now_us, waited_us
        own = None
        if exchange is not None and since is not None:
            own = max(0, now_us - since[0] - (waited_us - since[1]))
        spent, nominal, again = self._spent.pop(step, (0, 0, 0))
        self._taken = {step: ComputeTime(spent, nominal, again, exchange, own)}

    def time_of(self, step: int) -> ComputeTime | None:
        """Return the time of ``step`` and forget it; None if it is not known."""
        return self._taken.pop(step, None)
