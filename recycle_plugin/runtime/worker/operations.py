"""The torch code of each instruction that computes, or sums with other workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from recycle_plugin.core.vocabulary.dataflow import Datum, provides
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction, Op
from recycle_plugin.core.vocabulary.step_batches import LiveShare
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.timeline import Timeline
from recycle_plugin.runtime.movers.batches import unpacked
from recycle_plugin.runtime.stage.backward_choice import BackwardChoice
from recycle_plugin.runtime.stage.ports import Source
from recycle_plugin.runtime.stage.pushed_stage import PushedStage
from recycle_plugin.runtime.stage.stage import Stage
from recycle_plugin.runtime.worker.scripted import ScriptedStage
from recycle_plugin.runtime.worker.stepping import Stepping

Operation = Callable[[Instruction, StepStore, bool], Mapping[Datum, Any]]


class TorchOperations:
    """A worker's computing instructions (core.worker.machine.Operations), on a device that may be one instruction
    behind.

    ``timeline``: what the device has run, and when. ``agree(instruction)`` returns when all workers of the seat have
    the sum, before it replaces the contributions. ``source`` returns data by step and micro-batch. ``applied(step)`` is
    called after each step. ``choice``: which backwards of the stage are split, if that is a choice.
    """

    def __init__(
        self,
        session: Session,
        stage: Stage | ScriptedStage | PushedStage,
        stepping: Stepping,
        source: Source,
        applied: Callable[[int], None],
    ) -> None:
        self._view, self._stage, self.stepping = session.view, stage, stepping
        self._source, self._applied = source, applied
        self.agree: Callable[[Instruction], object] = bool
        self.choice: BackwardChoice | None = None
        self.timeline = Timeline(stage.device, lambda: session.waiting.timeout_s)
        self._table: Mapping[Op, Operation] = {
            Op.LOAD: self._load,
            **dict.fromkeys(COMPUTE, stage.compute),
            Op.STEP: self._step,
        }
        self._sums: Mapping[Op, Callable[[Instruction, Seat | None], Any]] = {
            Op.REDUCE: self._reduce,
            Op.TIE: self._tie,
        }

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """Return the results of LOAD, F, I, W, B or STEP. First wait until the device has finished the work before the
        last instruction; raises WaitTimeout if that takes too long.
        """
        return self.timeline.start(self._table[instruction.op], instruction, have, boundary_only)

    def add_up(self, instruction: Instruction, have: StepStore, holder: Seat | None) -> Any:
        """Return the result of REDUCE or TIE, made together with all workers that take part."""
        return self._sums[instruction.op](instruction, holder)

    def share(self, step: int, have: StepStore) -> float:
        """Return this stage's share of the squared norm of ``step``."""
        return self.stepping.share(step)

    def norm(self, shares: Mapping[str, float]) -> torch.Tensor:
        """Return the norm over all stages, from the share of each."""
        return self.stepping.clipping.norm_of(shares)

    def tied_in_order(self, total: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the result of TIE, in the form that all stages of the tie log."""
        return self.stepping.gradients.tied_in_order(total)

    def undo(self, step: int) -> None:
        """Undo ``step``, the last one."""
        self.stepping.undo(step)

    def go_by(self, share: LiveShare) -> None:
        """Set which part of the replicas contributes from now on."""
        self.stepping.go_by(share)

    def forget_sums(self, after: int) -> None:
        """Drop all gradients of the steps after ``after``."""
        self.stepping.forget_sums()

    def _load(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> dict[Datum, Any]:
        step, one = instruction.step, instruction.works_on
        data = Datum("data", instruction.stage, one, step)
        drawn = have.requires(instruction)  # an iterator's batch, or an evaluation's: a copy already
        batch = unpacked(have[drawn[0]]) if drawn else self._source(step, one)
        return {data: self._stage.load(batch, shared=bool(drawn))}

    def _reduce(self, instruction: Instruction, holder: Seat | None) -> list[torch.Tensor] | None:
        rank = None if holder is None else self._view.roster.holding(holder, self._view.shard).rank
        return self.stepping.reduce(instruction.step, rank, lambda: self.agree(instruction))

    def _tie(self, instruction: Instruction, holder: Seat | None) -> dict[int, torch.Tensor]:
        return self.stepping.gradients.tie(instruction.step)

    def _step(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> dict[Datum, Any]:
        self.stepping.apply(instruction.step)
        self._applied(instruction.step)
        return dict.fromkeys(provides(instruction))
