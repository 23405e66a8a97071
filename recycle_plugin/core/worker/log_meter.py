"""Measures the size of a worker's log, and the time that a replay of its steps would take."""

from __future__ import annotations

from recycle_plugin.core.vocabulary.instruction import COMPUTE, Op
from recycle_plugin.core.vocabulary.log_figures import LogFigures
from recycle_plugin.core.vocabulary.span import Span

AGAIN = COMPUTE | {Op.STEP}  # what a replay runs again


class LogMeter:
    """Measures the computing and sending of a worker, from its first step on."""

    def __init__(self) -> None:
        self._steps = self._us = self._down = self._up = self._logged = 0

    def ran(self, span: Span) -> None:
        """Count the time of an instruction that has run, if a replay would run it."""
        if span.instruction.op in AGAIN and span.instruction.step > 0:
            self._us += span.end_us - span.start_us

    def crossed(self, down: bool, size: int, logged: bool) -> None:
        """Count ``size`` bytes that were sent, ``down`` to the next stage or up to the one before."""
        self._down, self._up = self._down + size * down, self._up + size * (not down)
        self._logged += size * logged

    def stepped(self) -> None:
        """Count a step that was applied."""
        self._steps += 1

    @property
    def total(self) -> LogFigures:
        return LogFigures(self._steps, self._us / 1e6, self._down, self._up, self._logged)
