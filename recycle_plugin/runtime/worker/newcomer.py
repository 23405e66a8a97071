"""A newcomer's script on its way to the present: it gets the results of steps and evaluations, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from recycle_plugin.core.messages.from_coordinator import Recorded
from recycle_plugin.core.worker.loop_ports import DataEnded
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.stage.ports import OptimizerStep
from recycle_plugin.runtime.worker.changed_state import StateCounts

T = TypeVar("T")


class ScriptReplay:
    """A script's place among the recorded losses of steps and means of evaluations, by number. ``position``: the last
    step whose loss the script got; ``evaluated``: how many evaluations.
    """

    def __init__(self, position: int = 0) -> None:
        self._losses: dict[int, float] = {}
        self._evaluations: dict[int, float] = {}
        self._unknown: set[int] = set()
        self._unfilled: tuple[int, ...] = ()
        self._refused = ""
        self.position, self.evaluated = position, 0

    @property
    def only_steps(self) -> bool:
        """Whether the others are ahead of this script by steps only: by no evaluation, and no end of their data."""
        return not self._evaluations and all(step <= self.position for step in self._unfilled)

    def hear(self, message: Recorded) -> None:
        """Record the coordinator's message on past steps and evaluations."""
        self._refused = self._refused or message.refused
        self._unknown |= {*message.unknown}
        self._unfilled = message.unfilled
        known = enumerate(message.losses, message.step)
        self._losses.update((step, loss) for step, loss in known if step not in message.unknown)
        self._evaluations.update(enumerate(message.evaluations, message.evaluation))

    def loss(self) -> float | None:
        """Return the script's next loss, and advance; None while unknown. Raises RecycleError if no worker has it."""
        coming = self.position + 1
        if self._refused:
            raise RecycleError(f"{self._refused}: step {coming} can't be repeated")
        known = self._losses.pop(coming, None)
        if known is not None:
            self.position = coming
        elif coming in self._unknown or any(step > coming for step in self._losses):
            raise RecycleError(
                f"a newcomer's script comes to step {coming}, of which the others have no loss: it has to begin as "
                "theirs did, at the same step"
            )
        return known

    def evaluation(self) -> float | None:
        """Return the mean loss of the script's next evaluation, and advance; None while it is not known."""
        known = self._evaluations.pop(self.evaluated + 1, None)
        if known is not None:
            self.evaluated += 1
        return known


class NewcomersScript:
    """The script of a worker that has come into a job that trains, until it is let in.

    ``optimizer`` counts the steps that the script goes through. ``ask()`` asks the coordinator for a place, and for
    past results. ``follow(step)`` returns True once ``step`` is over, False if this worker is to train it. The state
    may be ahead of the script, which then sees its own ``counts``.
    """

    def __init__(
        self,
        session: Session,
        optimizer: OptimizerStep,
        counts: StateCounts,
        ask: Callable[[], None],
        follow: Callable[[int], bool],
    ) -> None:
        self._view, self._waiting = session.view, session.waiting
        self._optimizer, self._ask, self._follow = optimizer, ask, follow
        self._counts = counts
        self._further: tuple[int, Any] | None = None  # the state's step, if it is ahead, and its counts
        self._replay: ScriptReplay | None = None

    @property
    def position(self) -> int:
        """The last step that the script has gone through."""
        return self._begun.position

    @property
    def evaluated(self) -> int:
        """How many evaluations the script has gone through."""
        return 0 if self._replay is None else self._replay.evaluated

    def loss(self) -> float | None:
        """Return the loss of the script's next step, and count the step; None if this worker is to train it. Blocks
        until that is known. Raises as Waiting.until and ScriptReplay.loss do, and DataEnded if the others' data had
        ended before that step.
        """
        replay = self._begun
        coming = replay.position + 1
        if self._view.hears_end(coming):
            raise DataEnded(coming)
        if self._further is None and not self._is_over(coming):
            return None
        loss = self._wait(f"the loss of step {coming}", replay.loss)
        if self._further is not None and self._further[0] == coming:
            self._counts.put(self._further[1])
            self._further = None
        elif self._optimizer.steps < coming:  # it was not applied here
            self._optimizer.pass_over()
        return loss

    def may_skip(self) -> bool:
        """Whether the script may skip its next step: it is over, and not the last. Waits for the others' step."""
        replay = self._begun

        def look() -> bool | None:
            over = replay.position + 1 < self._view.committed
            return over and replay.only_steps if self._view.present else None

        return self._wait("the job's present step", look)

    def _is_over(self, coming: int) -> bool:
        """Whether step ``coming`` is over; waits until that is known. The counts stay the script's."""
        before = self._counts.get()
        over = self._follow(coming)
        if over and self._optimizer.steps > coming:
            self._further = self._optimizer.steps, self._counts.get()
            self._counts.put(before)
        return over

    def evaluation(self) -> float:
        """Return the mean loss of the script's next evaluation, which the others have made or make now."""
        replay = self._begun
        return self._wait(f"the mean of evaluation {replay.evaluated + 1}", replay.evaluation)

    @property
    def _begun(self) -> ScriptReplay:
        """The replay, which begins after the step of a checkpoint that the script has loaded."""
        if self._replay is None:
            self._replay = ScriptReplay(self._optimizer.steps)
            self._ask()
        return self._replay

    def _wait(self, what: str, look: Callable[[], T | None]) -> T:
        def news() -> T | None:
            for message in self._view.take_recorded():
                self._begun.hear(message)
            return look()

        return self._waiting.until(f"{what}, which the others know", news, interruptible=False)
