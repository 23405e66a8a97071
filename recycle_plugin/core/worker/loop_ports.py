"""The ports of a worker's training loop (core/worker/training_loop.py): who computes, who plans, and who talks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from recycle_plugin.core.messages.from_coordinator import Generation, Replay
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.iterator_draws import IteratorState, Place
from recycle_plugin.core.vocabulary.plan import Plan
from recycle_plugin.core.vocabulary.recovery_plan import Held, RecoveryPlan
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.step_batches import LiveShare, StepBatches
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Waits

T = TypeVar("T")
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


class StepRunner(Protocol):
    """The part of a worker that computes, as the training loop needs it. ``valid_from``: the generation from which its
    data is valid, in which it last went on from other weights (core/worker/step_store.py).
    """

    @property
    def valid_from(self) -> int:
        """The generation from which this worker's data is valid."""

    def execute(self, program: StepProgram) -> Iterator[Any]:
        """Run ``program``. Raises Interrupted."""

    def held(self) -> Iterable[Datum]:
        """Return the data that this worker has of uncommitted steps, except parameters."""

    def held_draws(self) -> dict[str, str]:
        """Return the batches of plain iterators that this worker keeps (core.vocabulary.iterator_draws.pack)."""

    @property
    def places(self) -> dict[str, Place]:
        """By step, ``place_behind`` the last applied step, and the next if begun; empty if there is none."""

    def place_behind(self, step: int) -> Place | None:
        """Return where its plain iterator stood after ``step``; None if it has none, or not at its replica's place."""

    def time_of(self, step: int) -> ComputeTime | None:
        """What ``step``, which was applied, took, the first time that it is asked for; None if nobody measures that."""

    @property
    def ended(self) -> int:
        """The number of this worker's plain iterator if that has ended, else 0."""

    @property
    def lacks(self) -> int:
        """The step for which this worker has found nothing to draw; 0 for none."""

    def leave_out(self, step: int, valid_from: int) -> None:
        """Drop all data of ``step``, which iterators can't fill; data is valid from generation ``valid_from``."""

    def take_state(self, iterator_state: IteratorState) -> None:
        """Take what all know of plain iterators; it holds until the next call."""

    def undo(self, step: int) -> None:
        """Take ``step``, the last applied one, back."""

    def record_norm(self, step: int, norm: float) -> None:
        """Record the ``norm`` that ``step`` was rejected for: the step is applied with regard to that."""

    def discard_after(self, after: int, valid_from: int) -> None:
        """Drop data of the steps after ``after``, which was computed with rejected weights. Data that still arrives
        from workers of a generation before ``valid_from`` is dropped too.
        """

    def without(self, batches: StepBatches) -> None:
        """Drop what no longer counts of void steps (core/vocabulary/step_batches.py)."""

    def listen_to(self, members: Iterable[str]) -> None:
        """Also take data from workers at these addresses from now on."""

    def keep_only(self, members: Iterable[str]) -> None:
        """Drop the connections to all workers except those at these addresses."""

    def park(self) -> None:
        """Prepare to wait long for others, who read what this worker has logged."""

    def accompany(self, replay: Replay) -> Iterator[Any]:
        """Replay this worker's stage beside its state, for other stages that are replayed."""

    def asked_to_help(self) -> bool | None:
        """Return True if a worker that replays a stage wants this one's help, else None."""

    def help(self, wanted: Callable[[int], bool]) -> Iterator[Any]:
        """Help such a worker. ``wanted(stage)``: whether that stage is still replayed."""

    def stop_helping(self) -> None:
        """Drop what was made to help."""

    def hand_over(self, newcomer: WorkerId, step: int) -> None:
        """Send a newcomer what this worker's script hands over after ``step``, if it has asked for that."""


class Planner(Protocol):
    """The planner as the training loop needs it; the same arguments give the same result on every worker."""

    def plan(self, view: ClusterView, generation: Generation) -> Plan:
        """Return the plan for the live seats of ``view``, with the slowness that ``generation`` names."""

    def lowered(self, plan: Plan, seat: Seat, step: int) -> tuple[Instruction, ...]:
        """Return the program of ``seat`` in ``plan`` for ``step``, with its sends, receives and loads."""

    def recover(
        self, plan: Plan, batches: StepBatches, step: int, held: Held, also_back: frozenset[Seat] = frozenset()
    ) -> RecoveryPlan:
        """Return what is left of ``step``, with micro-batches by ``batches`` (core.vocabulary.recovery_plan)."""


class LoopPort(Protocol):
    """How the training loop waits, and talks to the coordinator."""

    @property
    def control_view(self) -> ControlView:
        """What this worker knows of the control plane."""

    def wait(
        self,
        what: Callable[[], str] | str,
        ready: Callable[[], T | None],
        interruptible: bool = True,
        at_least_s: float = 0.0,
    ) -> Waits[T]:
        """Yield until ``ready()`` is not None, the value. ``what``: what it waits for, in words; ``at_least_s``: the
        least deadline, in seconds. Raises Interrupted or JobEnded as ``ControlView.check`` does; if not
        ``interruptible``, only JobEnded.
        """

    def send(self, message: object) -> None:
        """Send ``message`` to the coordinator."""

    def clock(self) -> float:
        """Return the time in seconds."""

    def reach(self, point: str) -> None:
        """Report that a point of the recovery is reached; injected faults strike here."""
