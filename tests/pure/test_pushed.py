"""What a program waits for where the script runs forward, backward and step itself."""

from __future__ import annotations

import pytest

from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.worker.pushed import Need, PushedSteps, Script

PROGRAM = [
    Instruction.parse(text) for text in ("0LOAD1.0@3", "0F1.0@3", "0B1.0@3", "0REDUCE@3", "0VALIDATE@3", "0STEP@3")
]
BATCH, STEP = Need.MICRO_BATCH, Need.STEP


@pytest.mark.parametrize(
    "script, lacks",
    [
        (Script(), [BATCH, BATCH, None, None, STEP, STEP]),
        (Script(gives=True), [None, None, None, None, STEP, STEP]),
        (Script(closes=True), [BATCH, BATCH, None, None, None, None]),
        (Script(gives=True, closes=True), [None] * 6),
    ],
    ids=str,
)
def test_what_a_program_lacks_of_its_script(script, lacks):
    assert [script.lacks(instruction) for instruction in PROGRAM] == lacks


def calls_over(*yielded) -> tuple[PushedSteps, list[bool]]:
    """The calls of a script over a program that yields this; and whether a step might end, each time it went on."""
    script, closed = Script(), []

    def program():
        for each in yielded:
            closed.append(script.closes)
            yield each

    return PushedSteps(script, program), closed


def through(call) -> tuple[list, object]:
    waits = []
    while True:
        try:
            waits.append(next(call))
        except StopIteration as end:
            return waits, end.value


def test_a_step_ends_in_step_and_in_no_other_call_but_one_that_asks_for_the_next_micro_batch():
    calls, closed = calls_over(Need.PASS, "the others", STEP, "the sum", Need.NOTHING, STEP, Need.NOTHING, Need.PASS)
    assert through(calls.begin()) == ([], None) and calls.need is Need.PASS and not calls.at_boundary
    assert through(calls.run()) == (["the others"], None) and calls.at_boundary
    assert through(calls.close()) == (["the sum"], True) and closed == [True, False, False, True, True]
    through(calls.begin())  # what it had in the step after that others have taken meanwhile
    assert calls.need is Need.PASS and closed[5:] == [True] * 3


def test_a_boundary_that_has_moved_is_none():
    calls, _ = calls_over(Need.PASS, STEP, BATCH, Need.PASS)
    through(calls.begin())
    through(calls.run())
    assert calls.at_boundary and through(calls.close()) == ([], False)
    assert calls.need is BATCH and not calls.at_boundary
