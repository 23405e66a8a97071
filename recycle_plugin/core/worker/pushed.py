"""A worker whose script runs its own loop: it calls forward, backward and step, and pushes what a program asks for.

The program stands at an instruction until the script has come to it, and the script stands in its call until the
program needs it again.  So a wait for the script is yielded, by a real worker too, and nothing that the script is not
in the middle of may wait for it: a membership change is heard of in its next call.

* LOAD waits for the next micro-batch of the script, whichever that is: what the script draws has no number.  One that
  was given and not computed, since the membership has changed between, is the next one that is asked for.
* F is the script's forward and backward, and what B adds up is what they have made.
* The first instruction of a program's end waits for the script's step.  Where nobody has the sum, and a lost replica's
  micro-batches have come to this seat, it asks for a micro-batch instead: the boundary has moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import STAGE_WIDE, Instruction, Op
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.worker.training_loop import StepProgram
from recycle_plugin.core.worker.worker import Worker


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
    has run so far, and those that held its seat before it in steps that were committed.
    """

    gives: bool = False
    closes: bool = False
    left: int = 0
    given: int = 0

    def begin(self) -> None:
        """Notes that the script runs the micro-batch that it has at hand."""
        self.gives = False
        self.left -= 1
        self.given += 1

    def lacks(self, instruction: Instruction) -> Need | None:
        """What the script has to do before ``instruction`` can begin; None where that is nothing."""
        if instruction.op in (Op.LOAD, Op.F) and not self.gives:
            return Need.MICRO_BATCH
        return Need.STEP if instruction.op in STAGE_WIDE and not self.closes else None


class PushedWorker(Worker):
    """A worker for whose ``script`` programs wait."""

    script: Script

    def place_behind(self, step: int) -> Place:
        """The place in this seat's data behind ``step``, the last one that is applied."""
        return Place(read=self.script.given)

    def skip_to(self, place: Place) -> None:
        """Counts on from where who held this seat before has come to."""
        self.script.given = place.read

    def execute(self, program: StepProgram) -> Iterator[Any]:
        """Runs ``program``; yields what it needs of the script.  Raises Interrupted."""
        self.script.left = sum(instruction.op is Op.F for instruction in program.instructions)
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
