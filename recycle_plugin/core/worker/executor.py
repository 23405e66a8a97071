"""The executor: the one loop that runs programs. All steps, real and simulated, pass through here. In the simulator
each wait is yielded, so one process drives every seat in virtual time. A real worker's waits block, so it drains its
own generator.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.span import Span

T = TypeVar("T")
Waits = Generator[Any, Any, T]  # yields what a simulated worker waits for, where a real one blocks; its value is a T


class Interrupted(Exception):
    """The membership changed: leave the program at this instruction boundary and recover."""


class InstructionRunner(Protocol):
    """The world in which programs run: virtual time, exact numbers, or torch."""

    def check_generation(self) -> None:
        """Raise :class:`Interrupted` if the membership has changed; such a change enters only here."""

    def now_us(self) -> int:
        """Return the world's clock, in integer microseconds."""

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterable[Any]:
        """Wait until the inputs of ``instruction`` are at ``seat``."""

    def reach(self, when: str, seat: Seat, instruction: Instruction) -> None:
        """Report that an instruction is about to run or has run (``when``: "before", "after"); faults strike here."""

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        """Carry out ``instruction`` at ``seat``."""

    def record(self, span: Span) -> None:
        """Record the time span of an instruction that has run."""


def execute(seat: Seat, program: Iterable[Instruction], world: InstructionRunner) -> Iterator[Any]:
    """Run ``program`` at ``seat`` in order, each instruction once its inputs are there. Raises Interrupted."""
    for instruction in program:
        world.check_generation()
        yield from world.await_inputs(seat, instruction)
        world.reach("before", seat, instruction)
        start = world.now_us()
        yield from world.perform(seat, instruction)
        world.record(Span(seat, instruction, start, world.now_us()))
        world.reach("after", seat, instruction)
