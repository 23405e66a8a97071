"""What scripts make of a step's sum between ``backward`` and ``step``: clipped, noised, zeroed; one change for all.

The sum that a worker gives to others who lack it stays as it is until all who take part in the step have the change
(core/worker/pushed.py); then the change takes its place, for those who follow without being members too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.runtime.collectives.group import MemberGroup
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.stage.gradients import Gradients
from recycle_plugin.runtime.worker.pushed_stage import Shown

NOBODY = 1 << 40  # more than any rank


class ScriptChanges:
    """core.worker.pushed.Agreement over ``group``, of those who have the same part of a sum.

    ``beside()``: what else the group does before a step; whether there was anything.
    """

    def __init__(
        self, session: Session, group: MemberGroup, gradients: Gradients, shown: Shown, beside: Callable[[], bool]
    ) -> None:
        self._session, self._group, self._gradients = session, group, gradients
        self._shown, self._beside = shown, beside
        self._step = 0  # whose change is here
        self._change: list[torch.Tensor | None] | None = None  # None: the sum stays as it is

    def exchange(self, step: int) -> Waits[bool]:
        """Take the change of whoever has one from a try before, else of the lowest rank that has made one; the value is
        whether anything was taken.  A generator that never yields.
        """
        sums, kept = self._gradients.sums(step), self._step == step
        made = self._change if kept else self._shown.made(sums)
        with self._summing(step):
            rank = self._session.rank
            told = torch.tensor([rank if kept else NOBODY, rank if made is not None else NOBODY])
            dist.all_reduce(told, dist.ReduceOp.MIN, self._group)
            giver = next((each for each in told.tolist() if each != NOBODY), None)
            if giver is not None:
                made = self._gradients.taken_from(giver, sums if made is None else made)
            more = self._beside()
        self._step, self._change = step, made
        return giver is not None or more
        yield

    def confirm(self, step: int) -> Iterator[None]:
        """Return when all have it."""
        with self._summing(step):
            dist.all_reduce(torch.zeros(1), dist.ReduceOp.MIN, self._group)
        return iter(())

    def adopt(self, step: int) -> None:
        """Have the change of ``step`` in the place of its sum, which is about to be applied."""
        assert self._step == step, f"step {step} is applied, and nobody has asked what scripts have made of its sum"
        self._gradients.replace_sums(step, self._gradients.sums(step) if self._change is None else self._change)
        self._change = None

    @contextmanager
    def _summing(self, step: int) -> Iterator[None]:
        """A context for what belongs to the sum of ``step``."""
        with self._session.at_work(Instruction(Op.REDUCE, 0, None, step)):
            yield
