"""What watches the steps of a worker, and steers none of them: its log, its stopwatch."""

from __future__ import annotations

from typing import Any

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.loop_ports import StepProgram


class Observer:
    """An observer of one worker, which is told at once, in the thread that trains; what it raises ends the step.

    A worker tells its observers in their order, the log first: what is logged may be lost with the process the moment
    after.
    """

    def begins(self, program: StepProgram) -> None:
        """``program``, of a step, is run next."""

    def kept(self, datum: Datum, value: Any, valid_from: int) -> None:
        """A value that a replay may need was sent, drawn or summed over a tie, or was made again after a loss; its
        maker's data is valid from generation ``valid_from``.
        """

    def ran(self, span: Span) -> None:
        """An instruction has run."""

    def summed(self, instruction: Instruction, took_us: int) -> None:
        """A sum was made with the others."""

    def applied(self, step: int, norm: Any) -> None:
        """``step`` was applied with regard to ``norm``, and may yet be taken back."""

    def rejected(self, after: int, valid_from: int) -> None:
        """What was made of the steps after ``after`` counts from generation ``valid_from`` on."""

    def committed(self, view: ControlView, valid_from: int) -> None:
        """What ``view`` says of commits and checkpoints is known; data here is valid from generation ``valid_from``."""

    def broke_off(self, step: int, why: str) -> None:
        """No replay leads over ``step``, for the reason ``why``."""

    def loaded(self, step: int) -> None:
        """Everything goes on from the state of ``step``, which was loaded."""

    def parks(self) -> None:
        """The worker is to wait long for others, who may read what is written here."""
