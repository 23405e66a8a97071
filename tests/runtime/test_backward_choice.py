"""Which backwards are split, and what a trace calls them."""

from __future__ import annotations

import pytest

from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.runtime.stage.backward_choice import AGAIN, SAMPLES, WARM_UP, BackwardChoice

SEAT = Seat(0, 1)
BATCH = [MicroBatch(0, index) for index in range(SAMPLES)]


def program(step: int, text: str, resumed: bool = False) -> StepProgram:
    return StepProgram(step, tuple(Instruction.parse(f"{one}@{step}") for one in text.split()), resumed=resumed)


def whole_step(step: int, micro_batches: int = SAMPLES) -> StepProgram:
    """All F, all I, all W, each in the same order."""
    return program(step, " ".join(f"1{op}{one}" for op in "FIW" for one in BATCH[:micro_batches]))


def run(choice: BackwardChoice, step: int, whole_us: int, micro_batches: int = SAMPLES) -> list[bool]:
    """Run a step in which F and a split I take 10 µs each; return which backwards were whole."""
    choice.begin(began := whole_step(step, micro_batches))
    ways = {}
    for one in began.instructions:
        if one.op is Op.F:
            ways[one.works_on] = choice.whole(one.works_on)
        elif one.op is Op.I:
            choice.runs((step, one.works_on), ways[one.works_on])
        took = whole_us if one.op is Op.I and ways[one.works_on] else 10
        if choice.measuring:
            choice.ran(Span(SEAT, one, 0, took))
    return list(ways.values())


@pytest.mark.parametrize("whole_us", (9, 10, 11))
def test_backwards_are_whole_if_that_was_no_longer_than_the_first_half_alone(whole_us):
    choice = BackwardChoice()
    steps = {step: set(run(choice, step, whole_us)) for step in range(1, WARM_UP + 6)}
    first = WARM_UP + 1
    assert all(steps[step] == {False} for step in range(1, first + 1)) and steps[first + 1] == {True}
    assert all(steps[step] == {whole_us <= 10} for step in range(first + 2, WARM_UP + 6))


def test_it_is_measured_again():
    choice, last = BackwardChoice(), WARM_UP + 2 + AGAIN
    ways = [set(run(choice, step, 5)) for step in range(1, last + 1)]
    assert all(way == {True} for way in ways[WARM_UP + 1 :])
    assert [set(run(choice, step, 50)) for step in range(last + 1, last + 4)] == [{False}, {True}, {False}]


@pytest.mark.parametrize("text", ("1I0.0 1I0.1 1F0.2 1W0.1 1W0.0", "1I0.0 1W0.0 1I0.1"))
def test_no_measurement_chooses_where_sums_would_have_another_order(text):
    choice = BackwardChoice()
    for step in range(1, WARM_UP + 4):
        run(choice, step, 5)
    pairs = {MicroBatch(0, 0)} if "1I0.0 1W0.0" in text else set()
    choice.begin(program(step + 1, text))
    assert not choice.measuring and {one for one in BATCH if choice.whole(one)} == pairs
    choice.begin(program(step + 1, "1I0.0 1I0.1 1W0.0 1W0.1", resumed=True))
    assert not any(map(choice.whole, BATCH))
    choice.begin(program(step + 1, "1I0.0 1I0.1 1W0.0 1W0.1"))
    assert all(map(choice.whole, BATCH))
    choice.keep_apart()
    choice.begin(program(step + 1, "1I0.0 1W0.0 1I0.1 1W0.1"))
    assert {one for one in BATCH if choice.whole(one)} == set(BATCH[:2])
    choice.begin(program(step + 1, "1I0.0 1I0.1 1W0.0 1W0.1"))
    assert not any(map(choice.whole, BATCH))


@pytest.mark.parametrize("resumed, text", [(False, "1I0.0 1I0.1 1W0.1 1W0.0"), (True, "1I0.0 1W0.0 1I0.1 1W0.1")])
def test_only_a_whole_step_whose_sums_keep_their_order_is_measured(resumed, text):
    choice, pairs = BackwardChoice(), {MicroBatch(0, 1)} | ({MicroBatch(0, 0)} if resumed else set())
    for step in range(1, WARM_UP + 4):
        choice.begin(program(step, text, resumed))
        assert not choice.measuring and {one for one in BATCH if choice.whole(one)} == pairs
    choice.begin(whole_step(step + 1))
    assert choice.measuring and not any(map(choice.whole, BATCH))


def test_a_stage_whose_ways_have_different_orders_is_measured_no_further():
    """As if a parameter is used both ways in a single micro-batch."""
    choice = BackwardChoice()
    for step in range(1, WARM_UP + 1):
        run(choice, step, 5)
    few, many = run(choice, WARM_UP + 1, 5, micro_batches=4), run(choice, WARM_UP + 2, 5)
    assert few == [False] * 4 and many == [True] * SAMPLES
    choice.begin(began := whole_step(WARM_UP + 3))
    assert choice.measuring
    for one in began.instructions:
        if one.op is Op.I and one.works_on == BATCH[0]:
            choice.keep_apart()
        if choice.measuring:
            choice.ran(Span(SEAT, one, 0, 10))
    assert not any(run(choice, WARM_UP + 4, 5))


def test_an_evaluation_chooses_nothing_and_none_of_it_is_measured():
    choice = BackwardChoice()
    choice.begin(began := program(1, "1I0.0 1W0.0"))
    choice.begin(StepProgram(-1, ()))
    assert began.in_turn and choice.whole(MicroBatch(0, 0))
    for step in range(2, WARM_UP + 2):
        choice.begin(whole_step(step))
    assert choice.measuring
    choice.begin(program(-2, "1F0.0"))
    assert not choice.measuring


def test_a_trace_has_a_whole_backward_as_one_and_what_is_run_again_for_a_peer_as_what_it_is():
    choice, one = BackwardChoice(), MicroBatch(0, 0)

    def names(text: str) -> list[str]:
        spans = [Span(SEAT, Instruction.parse(f"{each}@3"), 1, 2) for each in text.split()]
        return [str(named.instruction) for span in spans if (named := choice.named(span)) is not None]

    choice.begin(program(3, "1I0.0 1W0.0"))
    choice.runs((3, one), True)
    assert names("1F0.0 1I0.0 1SG0.0>0.0 1I0.0 1W0.0 1REDUCE") == [
        "1F0.0@3",
        "1B0.0@3",
        "1SG0.0>0.0@3",
        "1I0.0@3",
        "1REDUCE@3",
    ]
    choice.runs((3, one), False)  # all of it again, after rejected weights
    assert names("1I0.0 1W0.0") == ["1I0.0@3", "1W0.0@3"]
