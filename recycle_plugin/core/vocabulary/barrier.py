"""The barriers where all live workers meet outside steps (core/coordinator/facts/barriers.py)."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Meets(StrEnum):
    """What all workers have done once they have met at a barrier. The value begins the text form."""

    SCRIPT = ""  # come to one call of their scripts
    SAVED = "the end of"  # a script's call that saves a checkpoint
    WRITTEN = "the end of checkpoint"  # written one beside training; may be at another barrier meanwhile
    EVALUATED = "the end of evaluation"  # all losses are known
    DATA_ENDED = "the end of the data before step"  # found that no iterator fills this step
    LOADED = "the loaded checkpoint"  # all regroup
    RESIZED = "another batch size"  # all regroup


class Barrier(NamedTuple):
    """A barrier of one kind: of the call or the checkpoint ``name``, or of the evaluation or the step ``number``."""

    meets: Meets
    name: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.meets} {self.name or self.number or ''}".strip()
