"""The instructions, as plans, programs, traces, faults, errors and tests write them.

``2F1.3`` is stage 2, forward, micro-batch 3 of replica 1; ``2F1.3@17`` is the same in step 17, and ``2F1.3@-2`` in the
second evaluation. ``1SA0.2>0.2`` sends an activation to seat 0.2; ``2RA0.2<0.1`` receives it from seat 0.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat


class Op(str, Enum):
    """The kinds of instruction. The value is the text form."""

    LOAD = "LOAD"  # micro-batch from the data source: inputs on the first stage, labels on the last
    RECV_ACT = "RA"
    F = "F"  # forward
    SEND_ACT = "SA"
    RECV_GRAD = "RG"
    I = "I"
    SEND_GRAD = "SG"
    W = "W"  # backward, gradient of the weights
    B = "B"  # backward, both at once
    REDUCE = "REDUCE"  # sum of the stage's gradients over its live workers
    TIE = "TIE"  # sum of tied weights' gradients over the stages that share them (core/vocabulary/topology.py)
    VALIDATE = "VALIDATE"  # global gradient norm
    STEP = "STEP"  # optimizer step of the stage

    __hash__ = str.__hash__  # an enumeration's own one is a function in Python, called for each look into a set

    def __str__(self) -> str:
        return self.value


SENDS = frozenset({Op.SEND_ACT, Op.SEND_GRAD})
RECEIVES = frozenset({Op.RECV_ACT, Op.RECV_GRAD})
MOVES = SENDS | RECEIVES
STAGE_WIDE = frozenset({Op.REDUCE, Op.TIE, Op.VALIDATE, Op.STEP})
COMPUTE = frozenset({Op.F, Op.I, Op.W, Op.B})

_FORM = re.compile(
    rf"(?P<stage>\d+)(?P<op>{'|'.join(op.value for op in Op)})"
    r"(?P<micro_batch>\d+\.\d+)?(?:(?P<way>[<>])(?P<peer>\d+\.\d+))?(?:@(?P<step>-?\d+))?"
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action of one worker. ``step``: the optimizer step that it belongs to; 0 in a plan's template, negative in an
    evaluation (core/worker/evaluation.py). ``peer``: the other end of a send or receive. Raises ValueError if a
    micro-batch or a peer is missing or superfluous.
    """

    op: Op
    stage: int
    micro_batch: MicroBatch | None = None
    step: int = 0
    peer: Seat | None = None

    def __post_init__(self) -> None:
        if (self.micro_batch is None) != (self.op in STAGE_WIDE):
            raise ValueError(f"{self.op.name} {'takes no' if self.micro_batch else 'needs a'} micro-batch")
        if (self.peer is None) == (self.op in MOVES):
            raise ValueError(f"{self.op.name} {'takes no' if self.peer else 'needs a'} peer")

    @property
    def works_on(self) -> MicroBatch:
        """The instruction's micro-batch. Raises AssertionError for an instruction of a whole stage."""
        assert self.micro_batch is not None, f"{self} is for a whole stage"
        return self.micro_batch

    def at(self, step: int) -> Instruction:
        return Instruction(self.op, self.stage, self.micro_batch, step, self.peer)

    def __str__(self) -> str:
        text = f"{self.stage}{self.op.value}{self.micro_batch or ''}"
        if self.peer is not None:
            text += f"{'>' if self.op in SENDS else '<'}{self.peer}"
        return f"{text}@{self.step}" if self.step else text

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Return the instruction that ``text`` names, as ``str`` writes it. Raises ValueError that shows the form."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no instruction: write for instance 2F1.3, 2F1.3@17 or 1REDUCE@4")
        op = Op(match["op"])
        if match["way"] and (match["way"] == ">") != (op in SENDS):
            raise ValueError(f"{text!r}: a send points to its peer with '>', a receive with '<'")
        return cls(
            op,
            int(match["stage"]),
            MicroBatch.parse(match["micro_batch"]) if match["micro_batch"] else None,
            int(match["step"] or 0),
            Seat.parse(match["peer"]) if match["peer"] else None,
        )
