"""The errors that planning can fail with."""

from __future__ import annotations

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction


class PlanError(Exception):
    """No plan exists for this membership and policy; the message says what to change."""


class VerificationError(PlanError):
    """A plan breaks a rule, which is a mistake of the planner."""

    def __init__(self, rule: str, seat: Seat | None = None, instruction: Instruction | None = None) -> None:
        where = (
            f" (seat {seat}, {instruction})"
            if instruction is not None
            else f" (seat {seat})"
            if seat is not None
            else ""
        )
        super().__init__(rule + where)
