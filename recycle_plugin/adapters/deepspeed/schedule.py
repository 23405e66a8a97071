"""A worker's program as a DeepSpeed ``PipeSchedule``, for tools that inspect a pipeline engine.

Instructions are ``PipeInstruction`` s, with a map to the code that runs each. The worker runtime runs the program
itself (core/worker/executor.py), not through DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule as stock

from recycle_plugin.core.vocabulary.instruction import COMPUTE, Op
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.core.worker.worker import Worker
from recycle_plugin.runtime.worker.operations import TorchOperations

NAMES = {
    Op.LOAD: "Load",
    Op.F: "Forward",
    Op.B: "Backward",
    Op.I: "BackwardInput",
    Op.W: "BackwardWeight",
    Op.SEND_ACT: "SendActivation",
    Op.RECV_ACT: "RecvActivation",
    Op.SEND_GRAD: "SendGrad",
    Op.RECV_GRAD: "RecvGrad",
    Op.REDUCE: "ReduceGrads",
    Op.TIE: "TieGrads",
    Op.VALIDATE: "ValidateGrads",
    Op.STEP: "OptimizerStep",
}
COMMANDS = {
    op: type(name, (stock.PipeInstruction,), {"__module__": __name__, "__doc__": f"Op.{op.name}"})
    for op, name in NAMES.items()
}

INSTRUCTION_MAP = {
    COMMANDS[op]: TorchOperations.compute
    if op in COMPUTE or op in (Op.LOAD, Op.STEP)
    else TorchOperations.add_up
    if op in (Op.REDUCE, Op.TIE)
    else Worker.perform
    for op in Op
}


class PlanSchedule(stock.PipeSchedule):
    """A worker's program as a ``PipeSchedule``. Each command has its instruction as ``command.instruction``."""

    def __init__(self, program: StepProgram, micro_batches: int, stages: int, stage: int) -> None:
        super().__init__(micro_batches, stages, stage)
        self.program = program

    def steps(self) -> Iterator[list[stock.PipeInstruction]]:
        """Yield lists of one command for each instruction."""
        for instruction in self.program.instructions:
            yield [COMMANDS[instruction.op](instruction=instruction)]

    def num_pipe_buffers(self) -> int:
        """Return 0: micro-batches are kept by name, not by buffer."""
        return 0
