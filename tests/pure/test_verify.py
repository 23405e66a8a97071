"""The verifier refuses broken plans and says where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.planner import VerificationError, plan, verify
from tests.support.planned import EXAMPLE, LOST, UNIT, crossed

GOOD = plan(EXAMPLE.full().without(LOST), UNIT, Policy(activation_cap=8))
SEAT = Seat(0, 2)
PROGRAM = GOOD.programs[SEAT]


def with_program(program: tuple[Instruction, ...], seat: Seat = SEAT) -> Plan:
    return replace(GOOD, programs={**GOOD.programs, seat: program})


def swapped(one: str, two: str) -> tuple[Instruction, ...]:
    texts = [str(instruction) for instruction in PROGRAM]
    program = list(PROGRAM)
    here, there = texts.index(one), texts.index(two)
    program[here], program[there] = program[there], program[here]
    return tuple(program)


BROKEN = {
    "a weight gradient before its backward": (with_program(swapped("2I0.0", "2W0.0")), "runs after F"),
    "an instruction twice": (with_program(PROGRAM[:1] + PROGRAM), "runs after F"),
    "an instruction left out": (with_program(PROGRAM[1:]), "runs after nothing"),
    "a weight gradient left out": (with_program(tuple(one for one in PROGRAM if str(one) != "2W0.5")), "runs F I"),
    "no step": (with_program(PROGRAM[:-1]), "does not end with REDUCE, STEP"),
    "a reduce too early": (with_program(PROGRAM[-2:-1] + PROGRAM), "before the end"),
    "somebody else's micro-batch": (
        with_program((Instruction(Op.F, 2, MicroBatch(2, 0)),) + PROGRAM),
        "the route gives this to 2.2",
    ),
    "another stage": (with_program((Instruction(Op.F, 1, MicroBatch(0, 0)),) + PROGRAM), "an instruction of stage 1"),
    "too much memory": (replace(GOOD, policy=replace(GOOD.policy, activation_cap=2)), "the cap is 2"),
}


TIED = plan(replace(EXAMPLE, ties=((0, 2),)).full().without(LOST), UNIT, Policy())
BROKEN |= {
    "a stage that shares weights without a sum over them": (
        replace(
            TIED, programs={**TIED.programs, SEAT: tuple(one for one in TIED.programs[SEAT] if one.op is not Op.TIE)}
        ),
        "does not end with REDUCE, TIE, STEP",
    ),
    "a sum over nothing that is shared": (
        with_program((*PROGRAM[:-1], Instruction(Op.TIE, 2), PROGRAM[-1])),
        "does not end with REDUCE, STEP",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_plans_are_refused(what: str) -> None:
    broken, message = BROKEN[what]
    with pytest.raises(VerificationError, match=message):
        verify(broken)


def test_programs_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(VerificationError, match="0.0 waits before 0I0.1; 0.1 waits before 1F0.0"):
        verify(crossed())
