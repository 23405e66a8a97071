"""What a worker's training loop (core/worker/training_loop.py) runs on: who computes, who plans, and who talks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from recycle_plugin.core.messages.from_coordinator import Generation, Replay
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
    """All plain iterators have ended before ``step`` was filled, and everybody hears so in that step."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the data has ended before step {step} was filled")
        self.step = step


@dataclass(frozen=True)
class StepProgram:
    """The instructions that a worker runs of ``step``.

    ``boundary_only``, ``holder``: see core.vocabulary.recovery_plan.RecoveryPlan; nothing of them in a plan's own
    program.  ``resumed``: a failure has interrupted the step.  ``givers``: from whom data comes that an evaluation
    needs here and that this worker has not read.  ``share``: which part of the replicas contributes to the step.
    ``applied``: somebody has applied it already.
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
    """The part of a worker that computes, as the training loop needs it.

    ``valid_from``: the generation from which its data is valid, in which it last went on from other weights
    (core/worker/step_store.py).
    """

    @property
    def valid_from(self) -> int:
        """The generation from which this worker's data is valid."""

    def execute(self, program: StepProgram) -> Iterator[Any]:
        """Runs ``program``; raises Interrupted."""

    def held(self) -> Iterable[Datum]:
        """The data that this worker has of steps that are not committed, but parameters."""

    def held_draws(self) -> dict[str, str]:
        """The data of plain iterators that this worker keeps (core.vocabulary.iterator_draws.pack)."""

    @property
    def places(self) -> dict[str, Place]:
        """Where this worker's plain iterator stood behind the last applied step, and behind the next where that was
        begun, by their numbers; nothing where it does not stand at its replica's place, or there is none.
        """

    def place_behind(self, step: int) -> Place | None:
        """Where this worker's plain iterator stood behind ``step``; None where that is not its replica's place, or
        there is none.
        """

    @property
    def ended(self) -> int:
        """The number of this worker's plain iterator, if it has given all that it has; else 0."""

    @property
    def lacks(self) -> int:
        """The step for which this worker has found nothing to draw; 0 for none."""

    def leave_out(self, step: int, valid_from: int) -> None:
        """Drops all that there is of ``step``, which plain iterators can't fill; data is valid from generation
        ``valid_from`` now.
        """

    def take_state(self, iterator_state: IteratorState) -> None:
        """Takes what everybody knows of plain iterators; it holds from now on, until the next one comes."""

    def undo(self, step: int) -> None:
        """Takes ``step``, the last applied one, back."""

    def record_norm(self, step: int, norm: float) -> None:
        """Notes the ``norm`` that ``step`` was rejected for (core/coordinator/facts/step_validation.py): it is to be
        applied with regard to that.
        """

    def discard_after(self, after: int, valid_from: int) -> None:
        """Discards what is here of the steps after ``after``, which was computed with rejected weights.

        What still comes from workers that went on from them, those of a generation before ``valid_from``, is dropped.
        """

    def without(self, batches: StepBatches) -> None:
        """Drops what counts no more of void steps (core/vocabulary/step_batches.py)."""

    def listen_to(self, members: Iterable[str]) -> None:
        """Takes from now on also what workers at these addresses send."""

    def keep_only(self, members: Iterable[str]) -> None:
        """Drops the connections to all workers but those at these addresses, which are left."""

    def park(self) -> None:
        """Gets ready to wait long for others, who read what this worker has logged."""

    def accompany(self, replay: Replay) -> Iterator[Any]:
        """Replays this worker's stage beside its state, for others that are replayed."""

    def asked_to_help(self) -> bool | None:
        """Whether a worker that replays a stage wants something of this one: True, or None."""

    def help(self, wanted: Callable[[int], bool]) -> Iterator[Any]:
        """Does what such a worker wants.  ``wanted(stage)``: whether that stage is still replayed."""

    def stop_helping(self) -> None:
        """Lets go of what was made to help."""

    def hand_over(self, newcomer: WorkerId, step: int) -> None:
        """Sends a newcomer what this worker's script hands over after ``step``, if it has asked for that."""


class Planner(Protocol):
    """The planner as the training loop needs it; the same arguments give the same result on every worker."""

    def plan(self, view: ClusterView, generation: Generation) -> Plan:
        """The plan for the live seats of ``view``, with the slowness that ``generation``, which is entered, names."""

    def lowered(self, plan: Plan, seat: Seat, step: int) -> tuple[Instruction, ...]:
        """The program of ``seat`` in ``plan`` for ``step``, with its sends, receives and loads."""

    def recover(
        self, plan: Plan, batches: StepBatches, step: int, held: Held, also_back: frozenset[Seat] = frozenset()
    ) -> RecoveryPlan:
        """What is left of ``step``, whose micro-batches are those of ``batches``, as core.vocabulary.recovery_plan has
        it.
        """


class LoopPort(Protocol):
    """The means by which the training loop waits, and talks to the coordinator."""

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
        """Yields until ``ready()`` is not None; that is the value.  ``what``: what it waits for, in words;
        ``at_least_s``: its deadline is not sooner.

        Raises Interrupted or JobEnded as ``ControlView.check`` does; if not ``interruptible``, only JobEnded.
        """

    def send(self, message: object) -> None:
        """Sends ``message`` to the coordinator."""

    def clock(self) -> float:
        """The time in seconds."""

    def reach(self, point: str) -> None:
        """Tells that a point of the recovery is reached: injected faults strike here."""
