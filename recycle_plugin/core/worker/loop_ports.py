"""The programs that a worker's training loop runs (core/worker/training_loop.py), and its view of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from recycle_plugin.core.messages.from_coordinator import Generation
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.recovery_plan import Held, RecoveryPlan
from recycle_plugin.core.vocabulary.step_batches import LiveShare, StepBatches
from recycle_plugin.core.vocabulary.topology import ClusterView

LEAVE = "planned leave"  # why one worker's training ends
Slowness = tuple[tuple[Seat, int], ...]  # core.vocabulary.cost.CostModel's


class DataEnded(Exception):
    """All plain iterators have ended before ``step`` was filled; every script is told in that step."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the data has ended before step {step} was filled")
        self.step = step


@dataclass(frozen=True)
class StepProgram:
    """The instructions that a worker runs of ``step``.

    ``boundary_only``, ``holder``: see core.vocabulary.recovery_plan.RecoveryPlan; empty in a plan's own program.
    ``resumed``: a failure has interrupted the step. ``givers``: the seats that send data which an evaluation needs
    here. ``share``: which part of the replicas contributes to the step. ``applied``: a worker has applied it.
    """

    step: int
    instructions: tuple[Instruction, ...]
    boundary_only: frozenset[Instruction] = frozenset()
    holder: Seat | None = None
    resumed: bool = False
    givers: Mapping[Datum, Seat] = field(default_factory=dict)
    share: LiveShare = LiveShare()
    applied: bool = False

    @property
    def back_to_back(self) -> frozenset[MicroBatch]:
        """The micro-batches whose W directly follows their I."""
        pairs = pairwise(self.instructions)
        return frozenset(
            [w.works_on for i, w in pairs if w.op is Op.W and i.op is Op.I and i.micro_batch == w.micro_batch]
        )

    @property
    def in_turn(self) -> bool:
        """Whether this is a whole step's program, and its W come in the order of its I."""
        inputs, weights = ([one.micro_batch for one in self.instructions if one.op is op] for op in (Op.I, Op.W))
        return not self.resumed and inputs == weights


class Planner(Protocol):
    """The planner as the training loop needs it; the same arguments give the same result on every worker."""

    def plan(self, view: ClusterView, generation: Generation) -> Plan:
        """Return the plan for the live seats of ``view``, with the slowness that ``generation`` names."""

    def lowered(self, plan: Plan, seat: Seat, step: int) -> tuple[Instruction, ...]:
        """Return the program of ``seat`` in ``plan`` for ``step``, with its sends, receives and loads."""

    def recover(
        self, plan: Plan, batches: StepBatches, step: int, held: Held, also_back: frozenset[Seat] = frozenset()
    ) -> RecoveryPlan:
        """Return the rest of ``step`` to run, with micro-batches by ``batches`` (core.vocabulary.recovery_plan)."""
