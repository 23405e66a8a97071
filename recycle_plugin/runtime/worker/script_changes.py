"""What scripts make of a step's sum between ``backward`` and ``step`` (clipping, noise, zeros), made the same for all.

The original sum stays, for workers that lack it, until all that take part in the step have the change
(core/worker/pushed.py). Then the change replaces the sum, also for newcomers that follow.
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
    """core.worker.pushed.Agreement over ``group``, the workers with the same part of a sum."""

    def __init__(self, session: Session, group: MemberGroup, gradients: Gradients, shown: Shown) -> None:
        self._session, self._group, self._gradients, self._shown = session, group, gradients, shown
        self._step = 0  # the step of the change here
        self._change: list[torch.Tensor | None] | None = None  # None: the sum is unchanged

    def exchange(self, step: int) -> Waits[bool]:
        """Take the change of the lowest rank that has made one. Returns whether there is one; never yields."""
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
        """Wait until all have it."""
        with self._summing(step):
            dist.all_reduce(torch.zeros(1), dist.ReduceOp.MIN, self._group)
        return iter(())

    def adopt(self, step: int) -> None:
        """Replace the sum of ``step``, which is about to be applied, by its change."""
        assert self._step == step, f"step {step} is applied before the scripts' changes of its sum were collected"
        self._gradients.replace_sums(step, self._gradients.sums(step) if self._change is None else self._change)
        self._change = None

    @contextmanager
    def _summing(self, step: int) -> Iterator[None]:
        with self._session.thread.at_work(Instruction(Op.REDUCE, 0, None, step)):
            yield
