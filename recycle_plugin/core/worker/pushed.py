"""A worker whose script runs its own loop: it calls forward, backward and step, and pushes what a program asks for.

The program stands at an instruction until the script has come to it, and the script stands in its call until the
program needs it again.  So a wait for the script is yielded, by a real worker too, and nothing that the script is not
in the middle of may wait for it: a membership change is heard of in its next call.

* LOAD waits for the next micro-batch of the script, whichever that is: what the script draws has no number.  One that
  was given and not computed, since the membership has changed between, is the next one that is asked for.
* F is the script's forward and backward, and what B adds up is what they have made.
* REDUCE is made in the call that has run the last micro-batch, so that the script finds the sum of all behind that.
  Where nobody has it, and a lost replica's micro-batches have come to this seat, the program asks for a micro-batch
  instead: the boundary has moved.
* What follows waits for the script's step.  Until then the script may have changed what it finds of the sum, each its
  own.  Before STEP all take one of these changes, that of the lowest rank; and none applies it before all have it: so
  where somebody has applied the step, nobody asks once more, and where nobody has, any change is as good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import STAGE_WIDE, Instruction, Op
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.core.worker.training_loop import TrainingLoop
from recycle_plugin.core.worker.worker import Worker

CLOSING = STAGE_WIDE - {Op.REDUCE}  # what waits for the script's step


class Need(Enum):
    """What a worker waits for its script to do."""

    MICRO_BATCH = "give the next micro-batch"
    PASS = "run it forward and backward"
    STEP = "call step()"
    NOTHING = "whatever it likes: the step is committed"


@dataclass
class Script:
    """Where the script is.  ``gives``: it has a micro-batch at hand; ``closes``: a step may end in the call that it is
    in; ``left``: micro-batches that this worker has not begun yet of the program that it runs; ``given``: how many it
    has run so far, and those that held its seat before it in steps that were committed; ``behind``: the last applied
    step, and how many were given when it was applied.
    """

    gives: bool = False
    closes: bool = False
    left: int = 0
    given: int = 0
    behind: tuple[int, int] = (0, 0)

    def lacks(self, instruction: Instruction) -> Need | None:
        """What the script has to do before ``instruction`` can begin; None where that is nothing."""
        if instruction.op in (Op.LOAD, Op.F) and not self.gives:
            return Need.MICRO_BATCH
        return Need.STEP if instruction.op in CLOSING and not self.closes else None

    def passing(self) -> Iterator[Need]:
        """Yields until the script has run its micro-batch forward and backward, which is a machine's time for F."""
        yield Need.PASS
        self.gives = False
        self.left -= 1
        self.given += 1


class Agreement(Protocol):
    """The means by which those who have a sum come to one change of it by their scripts."""

    def exchange(self, step: int) -> Waits[bool]:
        """Takes one change of the sum of ``step`` for all; the value is whether there was anything to take.

        Raises Interrupted.
        """

    def confirm(self, step: int) -> Iterator[Any]:
        """Returns when all have been through :meth:`exchange`.  Raises Interrupted."""

    def adopt(self, step: int) -> None:
        """Puts the change in the place of the sum of ``step``, which is applied next."""


class PushedWorker(Worker):
    """A worker for whose ``script`` programs wait; ``agreement``: on what scripts have made of a sum."""

    script: Script
    agreement: Agreement
    called = False
    _adopted = 0  # the step whose sum is what is applied

    @property
    def places(self) -> dict[str, Place]:
        """The place in this seat's data behind the last applied step, by that step's number."""
        step = self._steps.stepped
        return {str(step): self.place_behind(step)}

    def place_behind(self, step: int) -> Place:
        """The place in this seat's data behind ``step``, the last one that is applied; what the script has given to the
        next one since does not count.
        """
        if self.script.behind[0] != step:  # it is being applied
            self.script.behind = step, self.script.given
        return Place(read=self.script.behind[1])

    def skip_to(self, place: Place, enters: bool = False) -> None:
        """Counts on from where who held this seat before has come to."""
        self.script.given = place.read

    def execute(self, program: StepProgram) -> Iterator[Any]:
        """Runs ``program``; yields what it needs of the script.  Raises Interrupted."""
        self.script.left = sum(instruction.op is Op.F for instruction in program.instructions)
        if self._steps.stepped < program.step:
            self.servings.say_changes(self._control_view.roster.workers, self._steps.stepped)
        yield from super().execute(program)

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """Waits for the script, and then as every worker does; a membership change may have come meanwhile."""
        lockstep = self._lockstep
        while (lockstep is None or not lockstep.stops) and (need := self.script.lacks(instruction)) is not None:
            yield need
            if lockstep is None:
                self.check_generation()
            else:
                yield from lockstep.come_to()
        yield from super().await_inputs(seat, instruction)

    def _await_inputs(self, instruction: Instruction) -> Iterator[Any]:
        yield from super()._await_inputs(instruction)
        if (
            instruction.op is Op.STEP
            and not self.running.applied
            and (yield from self.agreement.exchange(instruction.step))
        ):
            yield from self.agreement.confirm(instruction.step)

    def _step(self, instruction: Instruction) -> None:
        self.agreement.adopt(instruction.step)
        self._adopted = instruction.step
        super()._summed(instruction.step)
        super()._step(instruction)

    def _has_sum(self, step: int) -> bool:
        return step == self._adopted

    def _summed(self, step: int) -> None:
        """Nothing: the script may change it."""


def steps(loop: TrainingLoop) -> Iterator[Any]:
    """Trains step after step; yields what it needs of the script, which is nothing once a step is committed, and, where
    waits do not block, what it waits for.
    """
    while True:
        yield from loop.advance(loop.machine.stepped + 1)
        yield from loop.settle()
        yield Need.NOTHING


def follow(newcomer: Newcomer, view: ControlView) -> Iterator[Any]:
    """Returns when ``newcomer``, whose script begins where the others are, is a member with its stage's state."""
    yield from newcomer.start()
    step = max(1, view.committed)
    while (yield from newcomer.train(step)):
        step = (newcomer.clock or step) + 1


class PushedSteps:
    """The calls of a script, each of which goes on with the program until that needs the script again.

    ``make()``: the steps (:func:`steps`), made in the first call.  Generators, as all waits are.  Every call returns
    with all that is over committed.  ``need``: what the program waits for.
    """

    def __init__(self, script: Script, make: Callable[[], Iterator[Any]]) -> None:
        self._script, self._make = script, make
        self._steps: Iterator[Any] | None = None
        self.need = Need.NOTHING
        self.ran = False  # a micro-batch, since step() was called last

    @property
    def begun(self) -> bool:
        return self._steps is not None

    @property
    def at_boundary(self) -> bool:
        """Whether the micro-batch that the script runs, or has run last, is the last one that this worker has in its
        step, as far as is known; not before one has begun.
        """
        if self.need is Need.PASS:
            return self._script.left == 1
        return self.need is Need.STEP or (self._script.left == 1 and not self.ran)

    def open(self) -> Iterator[Any]:
        """Returns when the next step has begun as far as it can without a micro-batch: those who come back in it are
        members then, and so is this worker, if it is one of them.
        """
        yield from self._go_on(Need.MICRO_BATCH)

    def begin(self) -> Iterator[Any]:
        """Returns when the script may run the micro-batch forward that it has at hand."""
        self._script.gives = True
        yield from self._go_on(Need.PASS)

    def run(self) -> Iterator[Any]:
        """Goes on with what the script's forward and backward have made of the micro-batch."""
        self.ran = True
        self.need = yield from self._resume(closes=False)

    def close(self) -> Waits[bool]:
        """Applies the step, if the program has come to its end; the value is whether it was applied.  Where a loss has
        moved the boundary meanwhile it was not.
        """
        self.ran = False
        while self.need is Need.STEP:
            self.need = yield from self._resume(closes=True)
        return self.need is Need.NOTHING

    def hear(self) -> Iterator[Any]:
        """Recovers from a membership change that the script meets between two micro-batches of a step."""
        self.need = yield from self._resume(closes=False)

    def _go_on(self, until: Need) -> Iterator[Any]:
        """Goes on until the script has to do just that; a step may end meanwhile."""
        while self.need is not until:
            self.need = yield from self._resume(closes=True)

    def _resume(self, closes: bool) -> Waits[Need]:
        """Goes on with the program; the value is what it needs of the script."""
        if self._steps is None:
            self._steps = self._make()
        self._script.closes = closes
        while not isinstance(found := next(self._steps), Need):
            yield found
        return found
