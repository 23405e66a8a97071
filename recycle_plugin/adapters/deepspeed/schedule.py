"""A worker's program as a DeepSpeed ``PipeSchedule``, and our instructions as its ``PipeInstruction`` s."""

from __future__ import annotations

from typing import Iterator

from deepspeed.runtime.pipe import schedule as stock

from recycle_plugin.core.instruction import Instruction, Op
from recycle_plugin.core.loop import Program


class Load(stock.PipeInstruction):
    """Take a micro-batch from the data source; see ``Op.LOAD``."""


class Forward(stock.PipeInstruction):
    """``Op.F``"""


class Backward(stock.PipeInstruction):
    """Both gradients at once: ``Op.B``"""


class BackwardInput(stock.PipeInstruction):
    """Gradient of the input: ``Op.I``"""


class BackwardWeight(stock.PipeInstruction):
    """Gradient of the weights: ``Op.W``"""


class SendActivation(stock.PipeInstruction):
    """``Op.SEND_ACT``"""


class RecvActivation(stock.PipeInstruction):
    """``Op.RECV_ACT``"""


class SendGrad(stock.PipeInstruction):
    """``Op.SEND_GRAD``"""


class RecvGrad(stock.PipeInstruction):
    """``Op.RECV_GRAD``"""


class ReduceGrads(stock.PipeInstruction):
    """``Op.REDUCE``"""


class TieGrads(stock.PipeInstruction):
    """``Op.TIE``"""


class ValidateGrads(stock.PipeInstruction):
    """``Op.VALIDATE``"""


class OptimizerStep(stock.PipeInstruction):
    """``Op.STEP``"""


COMMANDS: dict[Op, type[stock.PipeInstruction]] = {
    Op.LOAD: Load,
    Op.F: Forward,
    Op.B: Backward,
    Op.I: BackwardInput,
    Op.W: BackwardWeight,
    Op.SEND_ACT: SendActivation,
    Op.RECV_ACT: RecvActivation,
    Op.SEND_GRAD: SendGrad,
    Op.RECV_GRAD: RecvGrad,
    Op.REDUCE: ReduceGrads,
    Op.TIE: TieGrads,
    Op.VALIDATE: ValidateGrads,
    Op.STEP: OptimizerStep,
}


class PlanSchedule(stock.PipeSchedule):
    """A worker's program.  Each yielded command carries its instruction as ``command.instruction``."""

    def __init__(self, program: Program, micro_batches: int, stages: int, stage: int) -> None:
        super().__init__(micro_batches, stages, stage)
        self.program = program

    def steps(self) -> Iterator[list[stock.PipeInstruction]]:
        for instruction in self.program.instructions:
            yield [COMMANDS[instruction.op](instruction=instruction)]

    def instructions(self) -> Iterator[Instruction]:
        """The program itself: what the executor runs."""
        for commands in self:
            yield from (command.instruction for command in commands)

    def num_pipe_buffers(self) -> int:
        return 0  # micro-batches are kept by name, not by buffer
