"""Text forms and dependency tables of core."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.dataflow import Datum, provides, requires
from recycle_plugin.core.vocabulary.faults import KINDS, POINTS, Fault
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import RECEIVES, SENDS, STAGE_WIDE, Instruction, Op
from recycle_plugin.core.vocabulary.topology import Topology

small = st.integers(0, 20)
seats = st.builds(Seat, small, small)
micro_batches = st.builds(MicroBatch, small, small)


@st.composite
def instructions(draw: st.DrawFn) -> Instruction:
    op = draw(st.sampled_from(list(Op)))
    micro_batch = None if op in STAGE_WIDE else draw(micro_batches)
    return Instruction(op, draw(small), micro_batch, draw(small), draw(seats) if op in SENDS | RECEIVES else None)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    when = draw(st.sampled_from(("before", "after", "at")))
    where = draw(st.sampled_from(POINTS)) if when == "at" else str(draw(instructions()))
    return Fault(
        draw(st.sampled_from(KINDS)), draw(seats), when, where, draw(st.integers(1, 9)), draw(st.integers(0, 2))
    )


@given(instructions())
def test_instruction_text_form_reads_back(instruction: Instruction) -> None:
    assert Instruction.parse(str(instruction)) == instruction


@given(faults())
def test_fault_text_form_reads_back(fault: Fault) -> None:
    assert Fault.parse(str(fault)) == fault


@pytest.mark.parametrize(
    "text", ["", "F", "2F", "2F1", "2F1.3@", "x2F1.3", "2REDUCE1.3", "2SA1.3", "2SA1.3<0.1", "2RA1.3>0.1", "2F1.3>0.1"]
)
def test_bad_instructions_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Instruction.parse(text)


def example(op: Op) -> Instruction:
    return Instruction(
        op, 1, None if op in STAGE_WIDE else MicroBatch(0, 2), 3, Seat(0, 0) if op in SENDS | RECEIVES else None
    )


@pytest.mark.parametrize("op", list(Op))
def test_dependencies_are_stated_for_every_op(op: Op) -> None:
    for stages, tied in ((2, False), (3, True)):
        needs, makes = requires(example(op), stages, (MicroBatch(0, 2),), tied), provides(example(op))
        assert isinstance(needs, tuple) and isinstance(makes, tuple), "a table over ops misses one"
        assert all(isinstance(datum, Datum) for datum in needs + makes)
        assert all(datum.step == 3 or datum == Datum("params", 1, None, 4) for datum in needs + makes)


def test_whatever_is_required_somebody_provides() -> None:
    made = {datum.kind for op in Op for datum in provides(example(op))}
    needed = {
        datum.kind
        for op in Op
        for stages in (2, 3)
        for datum in requires(example(op), stages, (MicroBatch(0, 2),), tied=True)
    }
    assert needed <= made


def test_forward_and_backward_require_the_parameters_of_their_step() -> None:
    for op in (Op.F, Op.I, Op.B):
        assert Datum("params", 1, None, 3) in requires(example(op), 3)


def test_blocks_have_their_micro_batches_in_the_order_of_the_sum() -> None:
    members = Blocks(Topology(2, 1, 3), 2).members()
    named = {tuple(block): [str(one) for one in each] for block, each in members.items()}
    assert named == {(0, 0): ["0.0", "0.1"], (0, 1): ["0.2"], (1, 0): ["1.0", "1.1"], (1, 1): ["1.2"]}
    assert list(members) == sorted(members)
