"""A newcomer's script on its way to the present: it is given what steps and evaluations gave, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable

from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.worker.ports import Optimizer
from recycle_plugin.runtime.worker.script_replay import ScriptReplay


class Newcomer:
    """The script of a worker that has come into a job that trains, until it is let in.

    ``optimizer`` counts the steps that the script goes through; ``ask()`` asks the coordinator for a place, and for
    what is over; later calls of it do nothing.
    """

    def __init__(self, session: Session, optimizer: Optimizer, ask: Callable[[], None]) -> None:
        self._session, self._optimizer, self._ask = session, optimizer, ask
        self._replay: ScriptReplay | None = None

    @property
    def evaluated(self) -> int:
        """How many evaluations the script has gone through."""
        return 0 if self._replay is None else self._replay.evaluated

    def loss(self) -> float | None:
        """The loss of the script's next step, which is counted; None where this worker is to train it itself.

        Blocks until one of both is known, and raises as Session.wait and ScriptReplay.loss do.
        """
        replay = self._begun
        loss = self._wait(lambda: f"the loss of step {replay.position + 1}", replay.loss)
        if loss is not None:
            self._optimizer.pass_over()
        return loss

    def evaluation(self) -> float | None:
        """The mean loss of the script's next evaluation; None where this worker is to take part in it."""
        replay = self._begun
        return self._wait(lambda: f"the mean of evaluation {replay.evaluated + 1}", replay.evaluation)

    @property
    def _begun(self) -> ScriptReplay:
        """The replay, which begins behind the steps of a checkpoint that the script has loaded."""
        if self._replay is None:
            self._replay = ScriptReplay({}, {}, self._optimizer.steps)
            self._ask()
        return self._replay

    def _wait(self, what: Callable[[], str], look: Callable[[], float | None]) -> float | None:
        def news() -> list[float] | None:
            for message in self._session.take_recorded():
                self._begun.hear(message)
            known = look()
            return [known] if known is not None else [] if self._is_member else None

        found = self._session.wait(lambda: f"{what()}, or a place among the others", news, interruptible=False)
        return found[0] if found else None

    @property
    def _is_member(self) -> bool:
        """Whether a membership with this worker has been made."""
        made = self._session.pending or self._session.generation
        return made is not None and self._session.worker in made.roster.workers
