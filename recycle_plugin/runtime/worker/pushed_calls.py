"""The calls of a real script that runs forward, backward and step itself, over core/worker/pushed.py. Waits block, and
calls in a wrong order raise errors here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from recycle_plugin.core.worker.pushed import Need, PushedSteps
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.pushed_stage import Made, PushedStage
from recycle_plugin.runtime.worker.blocking_loop import drain
from recycle_plugin.runtime.worker.trainer import Trainer


class PushedCalls:
    """A script's calls for each micro-batch that it pushes. Each returns with all finished steps committed."""

    def __init__(self, trainer: Trainer, stage: PushedStage) -> None:
        self._trainer, self._stage = trainer, stage
        self._steps = PushedSteps(stage.script, trainer.steps)
        self._told: Sequence[Any] | None = None  # settings by which the others apply this worker's first step
        self._opened = False  # the next step is begun, and none of its micro-batches

    @property
    def at_boundary(self) -> bool:
        """Whether the script's current or last micro-batch is this worker's last in the step, as far as is known."""
        return self._trainer.topology.micro_batches == 1 if self.between else self._steps.at_boundary

    @property
    def runs(self) -> bool:
        """Whether the script is in the middle of a micro-batch."""
        return self._steps.need is Need.PASS

    @property
    def wants_more(self) -> bool:
        """Whether the step waits for another micro-batch."""
        return self._steps.need is Need.MICRO_BATCH

    @property
    def between(self) -> bool:
        """Whether the script is between two steps."""
        return self._steps.need is Need.NOTHING

    @property
    def untouched(self) -> bool:
        """Whether no micro-batch of the next step has begun here."""
        return self.between or self._opened

    @property
    def begun(self) -> bool:
        return self._steps.begun

    @property
    def given(self) -> int:
        """How many micro-batches the scripts of this rank have given to steps so far."""
        return self._stage.script.given

    def loaded(self) -> None:
        """Count on from a checkpoint, loaded before the first step, as if nobody had been lost before it."""
        step, script = self._trainer.step, self._stage.script
        script.given = step * self._trainer.topology.micro_batches
        script.behind = step, script.given

    def end(self) -> None:
        """End this worker after its script, perhaps in the middle of a step, which nobody finishes then."""
        trainer = self._trainer
        if not self.between:
            trainer.drop_step()
        trainer.finish()

    def join(self) -> None:
        """Wait until this worker, which comes back, has its stage's state and is given work."""
        self._trainer.join()
        self._go_on(self._steps.open(), joins=True)
        self._opened = True
        self._told = self._trainer.state.optimizer.settings()

    def open(self) -> None:
        """Begin the next step before its first micro-batch, unless one has begun. From then on workers that come back
        take part in what the script asks of all.
        """
        if self.untouched:
            self._go_on(self._steps.open())
            self._opened = True
            self._take_told()

    def begin(self) -> None:
        """Wait until the script may run a micro-batch forward. Raises RecycleError if another call must come first."""
        if self.runs:
            raise RecycleError(
                "engine(…) was called twice: call engine.backward(loss) with the loss of one micro-batch before the "
                "next one's forward; a forward that is not trained goes under torch.no_grad()"
            )
        if self._steps.need is Need.STEP and self._steps.ran:  # unless a loss has taken micro-batches from the step
            raise RecycleError("engine.step() was left out: call it after each engine.backward(loss)")
        self._go_on(self._steps.begin())
        self._opened = False
        self._take_told()

    def run(self, made: Made) -> None:
        """Take the results of the script's forward and backward for the micro-batch."""
        self._stage.made = made
        self._go_on(self._steps.run())

    def close(self) -> bool:
        """Apply the step if the program has come to its end. Returns whether it did; a loss may have moved the
        boundary. Raises RecycleError if another call has to come first.
        """
        if self.runs:
            raise RecycleError("engine.step() before engine.backward(loss): call that first")
        if not self._steps.ran:
            raise RecycleError(
                "engine.step() without a micro-batch: call engine(…) and engine.backward(loss) before it"
            )
        applied: bool = self._go_on(self._steps.close())
        return applied

    def hear(self) -> None:
        """Recover from a membership change that the script meets outside a step."""
        if self.between:
            self._trainer.between_steps()
        else:
            self._go_on(self._steps.hear())

    def _take_told(self) -> None:
        """Apply this worker's first step with the others' settings: they include what the scripts do before a step,
        which this script has done again.
        """
        if self._told is not None:
            with self._trainer.lifted():
                self._trainer.state.optimizer.take_settings(self._told)
            self._told = None

    def _go_on(self, call: Iterator[Any], joins: bool = False) -> Any:
        """Run ``call`` to its end, and return its value. ``joins``: see Trainer.pushing."""
        with self._trainer.pushing(self.hear, joins):
            return drain(call)
