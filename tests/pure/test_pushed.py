"""What a program waits for where the script runs forward, backward and step itself."""

from __future__ import annotations

import pytest

from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.worker.pushed import Need, Script

PROGRAM = [
    Instruction.parse(text) for text in ("0LOAD1.0@3", "0F1.0@3", "0B1.0@3", "0REDUCE@3", "0VALIDATE@3", "0STEP@3")
]
BATCH, STEP = Need.MICRO_BATCH, Need.STEP


@pytest.mark.parametrize(
    "script, lacks",
    [
        (Script(), [BATCH, BATCH, None, STEP, STEP, STEP]),
        (Script(gives=True), [None, None, None, STEP, STEP, STEP]),
        (Script(closes=True), [BATCH, BATCH, None, None, None, None]),
        (Script(gives=True, closes=True), [None] * 6),
    ],
    ids=str,
)
def test_what_a_program_lacks_of_its_script(script, lacks):
    assert [script.lacks(instruction) for instruction in PROGRAM] == lacks
