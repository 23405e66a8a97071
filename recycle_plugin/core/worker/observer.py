"""Observers of a worker's steps that steer none of them: its log, its stopwatch."""

from __future__ import annotations

from typing import Any

from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.loop_ports import StepProgram


class Observer:
    """An observer of one worker, called at once, on the training thread; an error that it raises ends the step. A
    worker calls its observers in order, the log first, because the process may die at any moment.
    """

    def begins(self, program: StepProgram) -> None:
        """``program``, of a step, is run next."""

    def kept(self, datum: Datum, value: Any, valid_from: int) -> None:
        """A value that a replay may need was sent, drawn, tied or made again; valid from generation ``valid_from``."""

    def ran(self, span: Span) -> None:
        """An instruction has run."""

    def summed(self, instruction: Instruction, took_us: int) -> None:
        """A sum was made with the others, in ``took_us`` microseconds."""

    def applied(self, step: int, norm: Any) -> None:
        """``step`` was applied with regard to ``norm``, and may yet be taken back."""

    def time_of(self, step: int) -> ComputeTime | None:
        """Return the time of ``step`` on the first call after it was applied; None if it is not measured."""
        return None

    def rejected(self, after: int, valid_from: int) -> None:
        """Data of the steps after ``after`` counts only from generation ``valid_from`` on."""

    def committed(self, view: ControlView, valid_from: int) -> None:
        """``view`` has news of commits and checkpoints; data here is valid from generation ``valid_from``."""

    def broke_off(self, step: int, why: str) -> None:
        """No replay leads over ``step``, for the reason ``why``."""

    def loaded(self, step: int) -> None:
        """All go on from the state of ``step``, which was loaded."""

    def parks(self) -> None:
        """The worker is about to wait long for others, which may read the data written here."""
