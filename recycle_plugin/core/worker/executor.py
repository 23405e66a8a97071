"""The one loop that runs programs.

A simulated world yields what it waits for, so that one process drives every seat in virtual time;
the torch world blocks and yields nothing, so that a worker drains its own generator.  Fault-free
and degraded steps, real and simulated, all pass through here: there is no second interpreter.
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
    """Where programs run: virtual time, exact numbers, or torch."""

    def check_generation(self) -> None:
        """The only place where a membership change enters; raises :class:`Interrupted`."""

    def now_us(self) -> int: ...

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[Any]: ...

    def reach(self, when: str, seat: Seat, instruction: Instruction) -> None:
        """``before`` and ``after`` each instruction: where injected faults strike."""

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[Any]: ...

    def record(self, span: Span) -> None: ...


def execute(seat: Seat, program: Iterable[Instruction], world: InstructionRunner) -> Iterator[Any]:
    """Run ``program`` in order, each instruction once its inputs are there."""
    for instruction in program:
        world.check_generation()
        yield from world.await_inputs(seat, instruction)
        world.reach("before", seat, instruction)
        start = world.now_us()
        yield from world.perform(seat, instruction)
        world.record(Span(seat, instruction, start, world.now_us()))
        world.reach("after", seat, instruction)
