"""A worker's side of the commit rule: **step k+1 is applied only once step k is known to be committed.**

A stage steps on its own clock and may start the next step before other stages have finished this one. By the rule, at
most one applied step is uncommitted, so one undo record suffices. After a failure every worker is at the last committed
step or one ahead. A worker that is ahead stays there, unless work has to run again on the parameters before
(core/vocabulary/recovery_plan.py).
"""

from __future__ import annotations

AHEAD = 3  # from the last step reported as committed to the first that no worker can have started
EVALUATIONS_AHEAD = 2  # from the last evaluation reported as over to the last that any worker can have begun


def unstarted(committed: int) -> int:
    """Return the first step that no worker can have started if ``committed`` is the last commit sent.

    A worker that starts step c+3 has applied c+2, and did so only once it knew that c+1 is committed. The coordinator
    sends that commit after whatever it sends now, over the same connection. So every worker reads of a change that
    holds from this step on before it comes to the step.
    """
    return committed + AHEAD


def is_reached(step: int, committed: int, evaluated: int) -> bool:
    """Return whether a peer may send something of ``step`` to a worker that knows step ``committed`` to be committed
    and evaluation ``evaluated`` to be over. An evaluation's step is negative.

    A peer that starts step c+3 has applied c+2 and knew that c+1 is committed. So this worker has applied c+1, and knew
    that c is committed. A peer that begins evaluation e+2 has passed the barrier at the end of e+1. So this worker had
    reached that barrier and had passed the one at the end of e, or was told of both before it became a member.
    """
    return step <= committed + AHEAD if step >= 0 else -step <= evaluated + EVALUATIONS_AHEAD


class StepMachine:
    """The step counts of one worker: ``stepped`` steps are applied here, ``committed`` steps stay for good."""

    def __init__(self, stepped: int) -> None:
        self.stepped = stepped
        self.committed = stepped

    def may_apply(self, step: int) -> bool:
        """Return whether ``step`` may be applied here: the undo record of the step before may be overwritten."""
        return self.committed >= step - 1

    def applied(self, step: int) -> None:
        """Count ``step`` as applied. Raises AssertionError if it is not the next, or :meth:`may_apply` forbids it."""
        if step != self.stepped + 1 or not self.may_apply(step):
            raise AssertionError(f"step {step} applied after {self.stepped} steps, of which {self.committed} committed")
        self.stepped = step

    def commit(self, step: int) -> None:
        """Record that ``step`` is committed. Raises AssertionError if it is not applied here yet."""
        if step > self.stepped:
            raise AssertionError(f"step {step} committed, but only {self.stepped} applied here")
        self.committed = max(self.committed, step)

    def rewind(self, step: int) -> None:
        """Set both counts to ``step``, loaded from a checkpoint. Raises AssertionError if a step is uncommitted."""
        if self.stepped > self.committed:
            raise AssertionError(f"a checkpoint loaded while step {self.stepped} is applied and not committed")
        self.stepped = self.committed = step

    def resume(self, committed: int, undo: bool) -> None:
        """Go on from step ``committed``; ``undo``: take the last step back. Raises AssertionError if that can't be."""
        ahead = self.stepped - committed
        if ahead not in (0, 1) or committed < self.committed or (undo and not ahead):
            raise AssertionError(
                f"told to go on from step {committed} with {self.stepped} applied and {self.committed} committed here"
            )
        self.committed = committed
        self.stepped -= undo
