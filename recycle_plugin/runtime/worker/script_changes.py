"""What scripts make of a step's sum between ``backward`` and ``step``: clipped, noised, zeroed; one change for all.

The sum that a worker gives to others who lack it stays as it is until all who take part in the step have the change
(core/worker/pushed.py); then the change takes its place, for those who follow without being members too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.runtime.collectives.group import MemberGroup
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.stage.gradients import Gradients
from recycle_plugin.runtime.stage.pushed_stage import Shown

NOBODY = 1 << 40  # more than any rank


class ScriptChanges:
    """core.worker.pushed.Agreement over ``group``, of those who have the same part of a sum."""

    def __init__(self, session: Session, group: MemberGroup, gradients: Gradients, shown: Shown) -> None:
        self._session, self._group, self._gradients, self._shown = session, group, gradients, shown
        self._step = 0  # whose change is here
        self._change: list[torch.Tensor | None] | None = None  # None: the sum stays as it is

    def exchange(self, step: int) -> Waits[bool]:
        """Take the change of the lowest rank that has made one; the value is whether anything was taken.  A generator
        that never yields.
        """
        sums = self._gradients.sums(step)
        made = self._shown.made(sums)
        with self._summing(step):
            told = torch.tensor(NOBODY if made is None else self._session.rank)
            dist.all_reduce(told, dist.ReduceOp.MIN, self._group)
            if (giver := int(told)) != NOBODY:
                made = self._gradients.taken_from(giver, sums if made is None else made)
        self._step, self._change = step, made
        return giver != NOBODY
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
        with self._session.thread.at_work(Instruction(Op.REDUCE, 0, None, step)):
            yield
