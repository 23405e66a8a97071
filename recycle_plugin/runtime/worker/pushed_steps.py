"""The calls of a script that runs forward, backward and step itself: each goes on with the program until that needs the
script again (core/worker/pushed.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recycle_plugin.core.worker.pushed import Need
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.worker.pushed_stage import Made, PushedStage
from recycle_plugin.runtime.worker.trainer import Trainer


class PushedSteps:
    """The steps of ``trainer``, whose script pushes the micro-batches of ``stage``: the calls that it makes for each.

    Every one returns with all that is over committed.
    """

    def __init__(self, trainer: Trainer, stage: PushedStage) -> None:
        self._trainer, self._stage, self._script = trainer, stage, stage.script
        self._steps: Iterator[Any] | None = None
        self._need = Need.NOTHING
        self._ran = False  # a micro-batch, since step() was called last

    @property
    def at_boundary(self) -> bool:
        """Whether the micro-batch that the script runs, or has run last, is the last one that this worker has in its
        step, as far as is known.
        """
        if self._need is Need.NOTHING:
            return self._trainer.topology.micro_batches == 1
        if self._need is Need.PASS:
            return self._script.left == 1
        return self._need is Need.STEP or (self._script.left == 1 and not self._ran)

    @property
    def runs(self) -> bool:
        """Whether the script is in the middle of a micro-batch."""
        return self._need is Need.PASS

    @property
    def between(self) -> bool:
        """Whether the script is between two steps, and not in the middle of one."""
        return self._need is Need.NOTHING

    @property
    def begun(self) -> bool:
        """Whether a step has begun in this process."""
        return self._steps is not None

    @property
    def given(self) -> int:
        """The micro-batches that scripts of this rank have given to steps so far."""
        return self._script.given

    def loaded(self) -> None:
        """Count on from a checkpoint, before the first step, as if nobody had been lost before it."""
        self._script.given = self._trainer.step * self._trainer.topology.micro_batches

    def end(self) -> None:
        """Let this worker go: its script is through, in the middle of a step perhaps, which nobody finishes then."""
        trainer = self._trainer
        if not self.between:
            trainer.drop_step()
        trainer.finish()

    def join(self) -> None:
        """Return when this worker, which comes back, has its stage's state and is given work."""
        self._trainer.join()
        while self._need is not Need.MICRO_BATCH:
            self._need = self._resume(closes=True, joins=True)

    def begin(self) -> None:
        """Return when the script may run a micro-batch forward.  Raises RecycleError where another call has to come
        first.
        """
        if self._need is Need.PASS:
            raise RecycleError(
                "engine(…) was called twice: call engine.backward(loss) with the loss of one micro-batch before the "
                "next one's forward; a forward that is not trained goes under torch.no_grad()"
            )
        if self._need is Need.STEP:
            raise RecycleError("engine.step() was left out: call it after each engine.backward(loss)")
        self._script.gives = True
        while self._need is not Need.PASS:
            self._need = self._resume(closes=True)

    def run(self, made: Made) -> None:
        """Take what the script's forward and backward have made of the micro-batch."""
        self._stage.made, self._ran = made, True
        self._need = self._resume(closes=False)

    def close(self) -> bool:
        """Apply the step, if the program has come to its end; whether it was applied.  Where a loss has moved the
        boundary meanwhile it was not.  Raises RecycleError where another call has to come first.
        """
        if self._need is Need.PASS:
            raise RecycleError("engine.step() before engine.backward(loss): call that first")
        if not self._ran:
            raise RecycleError(
                "engine.step() without a micro-batch: call engine(…) and engine.backward(loss) before it"
            )
        self._ran = False
        while self._need is Need.STEP:
            self._need = self._resume(closes=True)
        return self._need is Need.NOTHING

    def hear(self) -> None:
        """Recover from a membership change that the script meets in something else than a step."""
        if self._need is Need.NOTHING:
            self._trainer.between_steps()
        else:
            self._need = self._resume(closes=False)

    def _resume(self, closes: bool, joins: bool = False) -> Need:
        """Go on with the program; returns what it needs of the script.  ``joins``: as for Trainer.pushing."""
        with self._trainer.pushing(self.hear, joins):
            if self._steps is None:
                self._steps = self._trainer.steps()
            self._script.closes = closes
            return next(self._steps)
