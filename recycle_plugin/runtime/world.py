"""The torch world: where a worker's program runs for real.

Waiting happens in ``await_inputs``, by name and with a deadline; a membership change enters only at
``check_generation``, between two instructions, or breaks a wait.  What an instruction does is looked
up in ``actions``, which the framework's adapter provides.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Callable, Iterator, Mapping

from recycle_plugin.core.executor import Span
from recycle_plugin.core.faults import Fault, FaultScript
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.instruction import SENDS, STAGE_WIDE, Instruction, Op
from recycle_plugin.core.step import StepMachine
from recycle_plugin.core.watch import COMPUTES, ELSEWHERE
from recycle_plugin.runtime.session import Session

OUTWARD = SENDS | STAGE_WIDE  # what a worker that the others have given up must not do


class TorchWorld:
    """``perform`` carries an instruction out; ``receive`` takes a boundary tensor from the transport."""

    def __init__(
        self,
        session: Session,
        machine: StepMachine,
        perform: Callable[[Instruction], None],
        receive: Mapping[Op, Callable[[Instruction], None]],
        faults: FaultScript,
        trace: Callable[[Span], None] | None = None,
    ) -> None:
        self._session = session
        self._machine = machine
        self._perform = perform
        self._receive = receive
        self._faults = faults
        self._trace = trace

    def check_generation(self) -> None:
        self._session.check()

    def now_us(self) -> int:
        return time.time_ns() // 1000  # one clock for all processes of a host, so that traces line up

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[None]:
        """Block until the tensor that a receive names has come, or until a step may be applied."""
        receive = self._receive.get(instruction.op)
        if receive is not None:
            receive(instruction)
        elif instruction.op is Op.STEP and not self._machine.may_apply(instruction.step):
            self._session.wait_committed(instruction.step - 1)
            self._machine.commit(instruction.step - 1)
        return iter(())

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[None]:
        if instruction.op in OUTWARD:
            self._session.assure(instruction)
        at = ELSEWHERE if instruction.op is Op.LOAD else COMPUTES
        with self._session.heart.at(at, instruction), self._session.at_work(instruction):
            self._perform(instruction)
        self._session.heart.finished()
        return iter(())

    def record(self, span: Span) -> None:
        if self._trace is not None:
            self._trace(span)

    def reach(self, when: str, seat: Seat, instruction: Instruction) -> None:
        fault = self._faults.due(when, str(instruction))
        if fault is not None:
            strike(fault, self._session)

    def reach_point(self, point: str) -> None:
        """A named point outside the program (core/faults.py)."""
        fault = self._faults.due("at", point)
        if fault is not None:
            strike(fault, self._session)


def strike(fault: Fault, session: Session) -> None:
    """Let an injected fault happen to this process, and say when."""
    session.note("fault", f"{fault} strikes process {os.getpid()}", fault=str(fault), seat=str(fault.seat), struck_at=time.time())
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "leave":
            os.kill(os.getpid(), signal.SIGTERM)
