"""The machine that a worker runs on: a clock, connections to other workers, and the device that computes and keeps its
stage's state. On a simulated machine generators yield each wait. On a real machine waits block, and nothing is yielded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from recycle_plugin.core.messages.activity import Awaited
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.step_batches import LiveShare
from recycle_plugin.core.worker.control_view import ControlPort
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.core.worker.serving import Outlet, SharedState
from recycle_plugin.core.worker.step_store import StepStore

T = TypeVar("T")


class Operations(Protocol):
    """The computations of a machine."""

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """Compute the results of LOAD, F, I, W, B or STEP from the store's data."""

    def go_by(self, share: LiveShare) -> None:
        """Set the contributing part of the replicas, by which REDUCE divides and STEP scales the rate."""

    def tied_in_order(self, total: Any) -> Any:
        """Return TIE's result in the form that all stages of the tie log."""

    def share(self, step: int, have: StepStore) -> float:
        """Return this stage's part of the squared gradient norm of ``step``."""

    def norm(self, shares: Mapping[str, float]) -> Any:
        """Return the norm over all stages, from their ``shares`` by stage number."""

    def undo(self, step: int) -> None:
        """Take the weights' last step, ``step``, back."""

    def forget_sums(self, after: int) -> None:
        """Drop the weight gradients of the steps after ``after`` that were summed here; at most one step has any."""


class Units(Protocol):
    """The state of a worker's stage, which fills a newcomer's."""

    def fill(self, head: Any) -> None:
        """Set the non-tensor state from ``head``, another worker's, and allocate the units."""

    def write(self, name: str, value: Any) -> None:
        """Write a unit of another worker's state."""

    def gathered(self, step: int, sums: Mapping[str, Any]) -> Mapping[Datum, Any]:
        """Return the results that REDUCE and TIE of ``step`` would have, with ``sums`` for these units and nothing for
        others.
        """

    def settings(self) -> Any:
        """Return the optimizer's settings for its next step, as a script sets them; not scaled for a step."""

    def take_settings(self, settings: Any) -> None:
        """Apply steps with another worker's settings from now on."""


class Hashing(Protocol):
    """Hashes of the state, made beside other work."""

    def hash_state(self, step: int) -> None:
        """Begin to hash the state after ``step``; the coordinator is sent the result."""

    def finish(self) -> None:
        """Return when no hash is being computed: the next action changes the state."""


class Machine(ControlPort, Protocol):
    """The machine that a worker runs on."""

    @property
    def operations(self) -> Operations:
        """The computations of this machine."""

    @property
    def units(self) -> Units:
        """The state of the worker's stage."""

    @property
    def hashing(self) -> Hashing:
        """Hashes of that."""

    def wait(
        self,
        what: Awaited,
        ready: Callable[[], T | None],
        interruptible: bool = True,
        at_least_s: float = 0.0,
    ) -> Waits[T]:
        """Yield until ``ready()`` is not None; the value is its result. ``what`` names the wait in errors;
        ``at_least_s``: the shortest deadline, in seconds. Raises Interrupted or JobEnded as ``ControlView.check`` does;
        if not ``interruptible``, only JobEnded.
        """

    def wait_for(self, datum: Datum, source: Seat, ready: Callable[[], T | None]) -> Waits[T]:
        """Yield until ``ready()`` is not None, for ``datum`` from ``source``; late data is sent again."""

    def wait_for_commit(self, step: int) -> Iterator[Any]:
        """Yield until ``step`` is committed. Called before the next step is applied."""

    def transfer(self, datum: Datum, value: Any, target: Seat, valid_from: int) -> None:
        """Send a value to the peer at ``target``, whose ``arrivals`` return it. ``valid_from``: the generation from
        which it is valid.
        """

    def arrivals(self) -> Iterable[tuple[Datum, Any, int]]:
        """Return the data that peers have sent since the last call: datum, value, and the generation from which it is
        valid.
        """

    def hear_out(self) -> None:
        """Receive all that lost workers have sent, and accept nothing more from them afterwards."""

    def listen_to(self, members: Iterable[str]) -> None:
        """Also take data from workers at these addresses from now on."""

    def keep_only(self, members: Iterable[str]) -> None:
        """Drop the connections to all workers except those at these addresses."""

    def clock(self) -> float:
        """Return the time in seconds."""

    def now_us(self) -> int:
        """Return the machine's clock, in integer microseconds."""

    def waited_us(self) -> int:
        """Return how long this worker has waited for others so far, in integer microseconds."""

    def reach(self, when: str, seat: Seat | None = None, instruction: Instruction | None = None) -> None:
        """Report that an instruction is about to run or has run, or that point ``when`` is reached; for faults."""

    def record(self, span: Span) -> Iterable[Span]:
        """Record an instruction's span. Return the spans that have ended since, later if a device lags its host."""

    def running(self, program: StepProgram) -> AbstractContextManager[Iterable[Instruction]]:
        """Return a context in which ``program`` runs; its value is the instructions to execute."""

    def begin(self, instruction: Instruction) -> None:
        """Record that ``instruction`` begins."""

    def end(self, instruction: Instruction) -> None:
        """Record that ``instruction`` has ended, done or not."""

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """Wait for the time that ``instruction`` takes, if no computing does."""

    def add_up(self, instruction: Instruction, have: StepStore, holder: Seat | None) -> Waits[Any]:
        """Make the sum of a REDUCE or TIE with all that take part; that is the value. ``holder``: the seat that has it
        already and gives it to the others. If several workers hold the seat, contributions stay until all of them begin
        to have the sum (core/worker/lockstep.py).
        """

    def number(self, loss: Any) -> Loss:
        """Return a loss as the coordinator is told it."""

    def open_outlet(self, newcomer: WorkerId) -> tuple[SharedState, Outlet, str]:
        """Return this worker's state for ``newcomer``, the line to it, and an address at which it is let in."""

    def script_state(self) -> bytes:
        """Return the value that this worker's script gives to a newcomer's script."""

    def watch_state(self) -> None:
        """From now on watch for the script's changes of the state before the next step."""
