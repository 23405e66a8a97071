"""A worker whose script runs its own loop: it calls forward, backward and step, and pushes what a program asks for.

The program stands at an instruction until the script has come to it, and the script stands in its call until the
program needs it again. So a wait for the script is yielded, by a real worker too. Nothing that the script is not in the
middle of may wait for it: a membership change is heard of in its next call.

* LOAD waits for the script's next micro-batch, whichever that is: what the script draws has no number. One that was
  given and not computed, because the membership changed, is the next one asked for.
* F is the script's forward and backward, and B adds up what they have made.
* REDUCE is made in the call that has run the last micro-batch, so that the script finds the sum of all behind that. If
  nobody has it, and a lost replica's micro-batches have come to this seat, the program asks for a micro-batch instead:
  the boundary has moved.
* What follows waits for the script's step. Until then each script may have changed the sum that it finds. Before STEP
  all take one of these changes, that of the lowest rank, and none applies it before all have it. So if a worker has
  applied the step, nobody asks again, and if none has, any change is as good.
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
    """What the script has to do before the program can go on; the value completes "the script has to"."""

    MICRO_BATCH = "give the next micro-batch"
    PASS = "run it forward and backward"
    STEP = "call step()"
    NOTHING = "nothing: the step is committed"


@dataclass
class Script:
    """Where the script is. ``gives``: it has a micro-batch at hand; ``closes``: a step may end in the current call;
    ``left``: micro-batches of the program that this worker has not begun; ``given``: micro-batches run at this seat in
    all, by its earlier holders in committed steps too; ``behind``: the last applied step, and ``given`` then.
    """

    gives: bool = False
    closes: bool = False
    left: int = 0
    given: int = 0
    behind: tuple[int, int] = (0, 0)

    def lacks(self, instruction: Instruction) -> Need | None:
        """Return the :class:`Need` that ``instruction`` waits for; None if it can begin."""
        if instruction.op in (Op.LOAD, Op.F) and not self.gives:
            return Need.MICRO_BATCH
        return Need.STEP if instruction.op in CLOSING and not self.closes else None

    def passing(self) -> Iterator[Need]:
        """Yield until the script has run its micro-batch forward and backward, which is a machine's time for F."""
        yield Need.PASS
        self.gives = False
        self.left -= 1
        self.given += 1


class Agreement(Protocol):
    """How the workers that have a sum agree on one change of it by their scripts."""

    def exchange(self, step: int) -> Waits[bool]:
        """Take one change of the sum of ``step`` for all; the value is whether there was any. Raises Interrupted."""

    def confirm(self, step: int) -> Iterator[Any]:
        """Return when all have been through :meth:`exchange`. Raises Interrupted."""

    def adopt(self, step: int) -> None:
        """Replace the sum of ``step``, which is applied next, by the change."""


class PushedWorker(Worker):
    """A worker whose programs wait for ``script``. ``agreement``: one choice among the scripts' changes of a step's
    sum.
    """

    script: Script
    agreement: Agreement
    called = False
    _adopted = 0  # the step whose sum is the one to apply

    @property
    def places(self) -> dict[str, Place]:
        """The place in this seat's data after the last applied step, by that step's number."""
        step = self._steps.stepped
        return {str(step): self.place_behind(step)}

    def place_behind(self, step: int) -> Place:
        """Return the place in this seat's data after ``step``, the last applied step, without the data of the next
        step.
        """
        if self.script.behind[0] != step:  # it is being applied
            self.script.behind = step, self.script.given
        return Place(read=self.script.behind[1])

    def skip_to(self, place: Place, enters: bool = False) -> None:
        """Count on from where this seat's earlier holders had come to."""
        self.script.given = place.read

    def execute(self, program: StepProgram) -> Iterator[Any]:
        """Run ``program``; yield each :class:`Need` of the script. Raises Interrupted."""
        self.script.left = sum(instruction.op is Op.F for instruction in program.instructions)
        if self._steps.stepped < program.step:
            self.servings.say_changes(self._control_view.roster.workers, self._steps.stepped)
        yield from super().execute(program)

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """Wait for the script, and then as every worker does; a membership change may have come meanwhile."""
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
        """Do nothing: the script may change the sum."""


def steps(loop: TrainingLoop) -> Iterator[Any]:
    """Train step after step. Yield each :class:`Need` of the script (NOTHING at a commit) and, if waits don't block,
    waits.
    """
    while True:
        yield from loop.advance(loop.machine.stepped + 1)
        yield from loop.settle()
        yield Need.NOTHING


def follow(newcomer: Newcomer, view: ControlView) -> Iterator[Any]:
    """Return when ``newcomer`` is a member with its stage's state. Its script begins at the job's present step."""
    yield from newcomer.start()
    step = max(1, view.committed)
    while (yield from newcomer.train(step)):
        step = (newcomer.clock or step) + 1


class PushedSteps:
    """The calls of a script, each of which goes on with the program until that needs the script again. ``make()``: the
    steps (:func:`steps`), made in the first call. All calls are generators, as all waits are, and return with all that
    is over committed. ``need``: what the program waits for.
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
        """Whether the script's current or last micro-batch is this worker's last in its step, as far as known."""
        if self.need is Need.PASS:
            return self._script.left == 1
        return self.need is Need.STEP or (self._script.left == 1 and not self.ran)

    def open(self) -> Iterator[Any]:
        """Return when the next step has begun up to its first micro-batch; newcomers of this step are members then."""
        yield from self._go_on(Need.MICRO_BATCH)

    def begin(self) -> Iterator[Any]:
        """Return when the script may run the micro-batch at hand forward."""
        self._script.gives = True
        yield from self._go_on(Need.PASS)

    def run(self) -> Iterator[Any]:
        """Go on with the result of the script's forward and backward."""
        self.ran = True
        self.need = yield from self._resume(closes=False)

    def close(self) -> Waits[bool]:
        """Apply the step if the program is at its end; the value is whether it was. A loss may move the boundary."""
        self.ran = False
        while self.need is Need.STEP:
            self.need = yield from self._resume(closes=True)
        return self.need is Need.NOTHING

    def hear(self) -> Iterator[Any]:
        """Recover from a membership change that the script meets between two micro-batches of a step."""
        self.need = yield from self._resume(closes=False)

    def _go_on(self, until: Need) -> Iterator[Any]:
        """Go on until the script has to do exactly ``until``; a step may end meanwhile."""
        while self.need is not until:
            self.need = yield from self._resume(closes=True)

    def _resume(self, closes: bool) -> Waits[Need]:
        """Go on with the program; the value is the next :class:`Need` of the script."""
        if self._steps is None:
            self._steps = self._make()
        self._script.closes = closes
        while not isinstance(found := next(self._steps), Need):
            yield found
        return found
