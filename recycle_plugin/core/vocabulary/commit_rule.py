"""A worker's side of the commit rule.

A stage steps on its own clock and may start the next step before the others have finished this one.
It keeps one record that takes its last step back.  That one suffices because of this rule: **step
k+1 is applied only once step k is known to be committed.**  So at most one applied step is
uncommitted, and after a failure every worker is at the last committed step or one ahead of it.
Whoever is ahead stays so, unless work has to be run again on the parameters before (core/vocabulary/recovery_plan.py).
"""

from __future__ import annotations

AHEAD = 3  # from the last step that is said to be committed to the first one that nobody can have started
EVALUATIONS_AHEAD = 2  # from the last evaluation that is said to be over to the last one that anybody can have begun


def unstarted(committed: int) -> int:
    """The first step that nobody can have started while ``committed`` is the last step that the coordinator has said to
    be committed.

    Whoever starts step c+3 has applied c+2, and that only once it knew c+1 to be committed.  The coordinator says so
    after whatever it says now, over the same connection.  So all workers read of a change that holds from this step on
    before they come to it.
    """
    return committed + AHEAD


def is_reached(step: int, committed: int, evaluated: int) -> bool:
    """Whether a peer may have something of ``step`` for a worker that knows step ``committed`` to be committed, and
    evaluation ``evaluated`` to be over.  An evaluation's step is negative.

    Who starts step c+3 has applied c+2, and knew c+1 to be committed; so the other one has applied that, and knew c to
    be committed.  Who begins evaluation e+2 has passed the barrier at the end of e+1; so the other one has come there,
    and had passed the one at the end of e, or was told of both before it became a member.
    """
    return step <= committed + AHEAD if step >= 0 else -step <= evaluated + EVALUATIONS_AHEAD


class StepMachine:
    """The step counts of one worker: ``stepped`` steps are applied here, and ``committed`` steps stay for good."""

    def __init__(self, stepped: int) -> None:
        self.stepped = stepped
        self.committed = stepped

    def may_apply(self, step: int) -> bool:
        """Whether ``step`` may be applied here: the undo record of the step before is free to be overwritten."""
        return self.committed >= step - 1

    def applied(self, step: int) -> None:
        """Counts ``step`` as applied.  Raises AssertionError unless it is the next one and :meth:`may_apply` allows
        it.
        """
        if step != self.stepped + 1 or not self.may_apply(step):
            raise AssertionError(f"step {step} applied after {self.stepped} steps, of which {self.committed} committed")
        self.stepped = step

    def commit(self, step: int) -> None:
        """Takes in the coordinator's news that ``step`` is committed.  Raises AssertionError where that step has not
        been applied here yet, since a commit never runs ahead of a worker.
        """
        if step > self.stepped:
            raise AssertionError(f"step {step} committed, but only {self.stepped} applied here")
        self.committed = max(self.committed, step)

    def rewind(self, step: int) -> None:
        """Sets both counts to ``step``, whose state everybody has loaded from a checkpoint.  Raises AssertionError
        while a step is applied here and not committed.
        """
        if self.stepped > self.committed:
            raise AssertionError(f"a checkpoint loaded while step {self.stepped} is applied and not committed")
        self.stepped = self.committed = step

    def resume(self, committed: int, undo: bool) -> None:
        """Goes on from step ``committed`` after a membership change.  With ``undo`` this worker, which is one step
        ahead, takes its last step back.  Raises AssertionError where the counts do not fit.
        """
        ahead = self.stepped - committed
        if ahead not in (0, 1) or committed < self.committed or (undo and not ahead):
            raise AssertionError(
                f"told to go on from step {committed} with {self.stepped} applied and {self.committed} committed here"
            )
        self.committed = committed
        self.stepped -= undo
