"""What a worker runs on: a clock, lines to others, and whoever computes and keeps its stage's state.

Generators yield what a simulated machine waits for; a real one blocks and yields nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.step_batches import LiveShare
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.core.worker.serving import Outlet, SharedState
from recycle_plugin.core.worker.step_store import StepStore

T = TypeVar("T")


class Operations(Protocol):
    """What a machine computes."""

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """Makes what LOAD, F, I, W, B or STEP provides, of what the store has."""

    def go_by(self, share: LiveShare) -> None:
        """Takes which part of the replicas contributes to what is run from now on: REDUCE divides by that, and STEP
        scales the learning rate for itself (core/vocabulary/step_batches.py).
        """

    def tied_in_order(self, total: Any) -> Any:
        """What TIE has made, as all stages of the tie log it."""

    def share(self, step: int, have: StepStore) -> float:
        """This stage's part of the squared gradient norm of ``step``."""

    def norm(self, shares: Mapping[str, float]) -> Any:
        """The norm over all stages, from the share of each, by its number."""

    def undo(self, step: int) -> None:
        """Takes the weights' last step, ``step``, back."""

    def forget_sums(self, after: int) -> None:
        """Drops the weight gradients of the steps after ``after`` that were added up here; of one step at most there
        are any.
        """


class Units(Protocol):
    """The state of a worker's stage, which a newcomer's is filled with."""

    def fill(self, head: Any) -> None:
        """Takes what goes by value from another worker's state, and makes room for units."""

    def write(self, name: str, value: Any) -> None:
        """Writes a unit of another worker's state."""

    def gathered(self, step: int, sums: Mapping[str, Any]) -> Mapping[Datum, Any]:
        """What REDUCE and TIE of ``step`` would have left, with ``sums`` for these units, and nothing for others."""

    def settings(self) -> Any:
        """What the optimizer applies its next step with, learning rates and the like, which a script may set; not
        scaled for a step.
        """

    def take_settings(self, settings: Any) -> None:
        """Applies steps with another worker's settings from now on."""


class Hashing(Protocol):
    """Hashes of that state, made beside what else is done."""

    def hash_state(self, step: int) -> None:
        """Begins to hash the state after ``step``, beside what else is done; the coordinator is sent the result."""

    def finish(self) -> None:
        """Returns when no hash is being made: what follows changes the state."""


class Machine(Protocol):
    """The machine that a worker runs on."""

    @property
    def operations(self) -> Operations:
        """What it computes."""

    @property
    def units(self) -> Units:
        """The state of the worker's stage."""

    @property
    def hashing(self) -> Hashing:
        """Hashes of that."""

    @property
    def control_view(self) -> ControlView:
        """What this worker knows of the control plane."""

    def wait(
        self, what: Callable[[], str] | str, ready: Callable[[], T | None], interruptible: bool = True
    ) -> Waits[T]:
        """Yields until ``ready()`` is not None; that is the value.  ``what``: what it waits for, in words.

        Raises Interrupted or JobEnded as ``ControlView.check`` does; if not ``interruptible``, only JobEnded.
        """

    def wait_for(self, datum: Datum, source: Seat, ready: Callable[[], T | None]) -> Waits[T]:
        """Yields until ``ready()`` is not None, for ``datum`` that comes from ``source``; where that takes too long,
        the coordinator has to hear of it, and has it sent again.
        """

    def wait_for_commit(self, step: int) -> Iterator[Any]:
        """Yields until ``step`` is committed, before the next one is applied."""

    def send(self, message: object) -> None:
        """Sends ``message`` to the coordinator."""

    def transfer(self, datum: Datum, value: Any, target: Seat, valid_from: int) -> None:
        """Sends a value to the peer at ``target``, where it comes out of ``arrivals``.  ``valid_from``: the generation
        from which this worker's data is valid.
        """

    def arrivals(self) -> Iterable[tuple[Datum, Any, int]]:
        """The data that has come from peers since this was asked last: datum, value, and the generation from which the
        sender's data is valid.
        """

    def hear_out(self) -> None:
        """Takes what the lost have sent before they went, and nothing of theirs that comes after this."""

    def listen_to(self, members: Iterable[str]) -> None:
        """Takes from now on also what workers at these addresses send."""

    def keep_only(self, members: Iterable[str]) -> None:
        """Drops the connections to all workers but those at these addresses, which are left."""

    def now_us(self) -> int:
        """The machine's clock, in integer microseconds."""

    def waited_us(self) -> int:
        """How long this worker has waited for others so far, in integer microseconds."""

    def reach(self, when: str, seat: Seat | None = None, instruction: Instruction | None = None) -> None:
        """Tells that an instruction is about to run or has run (``when``: "before" or "after"), or that a point is
        reached, which ``when`` names: injected faults strike here.
        """

    def record(self, span: Span) -> Iterable[Span]:
        """Takes the time span in which an instruction was carried out; returns the spans of what is over since, which
        is later where a device computes behind its host.
        """

    def running(self, program: StepProgram) -> AbstractContextManager[Iterable[Instruction]]:
        """A context in which ``program`` runs; its value is the instructions to execute."""

    def begin(self, instruction: Instruction) -> None:
        """Notes that ``instruction`` is carried out now."""

    def end(self, instruction: Instruction) -> None:
        """Notes that it is not any more, whether it was done or not."""

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """Waits for the time that ``instruction`` takes, where no computing does."""

    def add_up(self, instruction: Instruction, have: StepStore, holder: Seat | None) -> Waits[Any]:
        """Makes the sum of a REDUCE or TIE with all that take part; that is the value.

        ``holder``: who has it already, and gives it to the others.  Where several workers hold the seat, contributions
        stay until all of them begin to have the sum (core/worker/lockstep.py).
        """

    def number(self, loss: Any) -> Loss:
        """A loss as it is told to the coordinator."""

    def open_outlet(self, newcomer: WorkerId) -> tuple[SharedState, Outlet, str]:
        """The state of this worker's stage for ``newcomer``, the line to it, and an address at which it is let in."""

    def script_state(self) -> bytes:
        """What this worker's script hands over to a newcomer's."""

    def watch_state(self) -> None:
        """Watches from now on what the script changes of the state before the next step."""
