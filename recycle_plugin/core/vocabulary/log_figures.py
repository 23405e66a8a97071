"""What a worker has measured of its steps, from which follows which boundaries are worth logging."""

from __future__ import annotations

from typing import NamedTuple


class LogFigures(NamedTuple):
    """A worker's figures over ``steps``: seconds ``computed``, bytes sent ``down``, ``up``, and ``logged``."""

    steps: int = 0
    computed: float = 0.0
    down: int = 0
    up: int = 0
    logged: int = 0

    def since(self, before: LogFigures) -> LogFigures:
        """Return the difference to the earlier figures ``before``."""
        return LogFigures(
            self.steps - before.steps,
            self.computed - before.computed,
            self.down - before.down,
            self.up - before.up,
            self.logged - before.logged,
        )


class StageFigures(NamedTuple):
    """The ``figures`` of a worker of ``stage``, whose state has ``state_bytes``."""

    stage: int
    state_bytes: int
    figures: LogFigures
