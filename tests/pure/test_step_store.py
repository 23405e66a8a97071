"""What a worker has of uncommitted steps: how it comes, is used up, promised, and goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.dataflow import Datum, consumes, provides
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import STAGE_WIDE, Instruction, Op
from recycle_plugin.core.worker.step_store import StepStore

STAGES, STAGE, STEP = 3, 1, 7
ONE, OTHER = MicroBatch(0, 0), MicroBatch(1, 2)


def datum(kind: str, micro_batch: MicroBatch | None = ONE, step: int = STEP, stage: int = STAGE) -> Datum:
    return Datum(kind, stage, micro_batch, step)


def instruction(op: Op, micro_batch: MicroBatch | None = ONE, step: int = STEP) -> Instruction:
    return Instruction(op, STAGE, None if op in STAGE_WIDE else micro_batch, step)


def params(step: int = STEP) -> Datum:
    return datum("params", None, step)


def store(committed: int = STEP - 1, **named) -> StepStore:
    found = StepStore(Seat(0, STAGE), STAGES, committed=committed, **named)
    found.put(params(committed + 1), f"weights of {committed + 1}")
    return found


def made(one: Instruction, have: StepStore, boundary_only: bool = False) -> dict[Datum, str]:
    return {each: f"{each} by {one}" for each in provides(one)}


def run(
    here: StepStore, *ops: Op, micro_batch: MicroBatch = ONE, step: int = STEP, boundary_only: bool = False
) -> None:
    """What comes from other stages comes right before it is needed."""
    for op in ops:
        one = instruction(op, micro_batch, step)
        for needed in here.missing(one):
            here.arrive(needed, "from a peer", here.valid_from)
        here.run(one, made, boundary_only)


# --- the dataflow -----------------------------------------------------------------------------------


@given(st.permutations([(op, one) for one in (ONE, OTHER) for op in (Op.F, Op.I, Op.W)]), st.booleans())
def test_what_is_here_is_what_the_dataflow_says(order, fused):
    """Any order in which each micro-batch's instructions run in theirs."""
    turns = {one: iter((Op.F, Op.B) if fused else (Op.F, Op.I, Op.W)) for one in (ONE, OTHER)}
    here, expected = store(), {params()}
    for _, micro_batch in order:
        op = next(turns[micro_batch], None)
        if op is None:
            continue
        one = instruction(op, micro_batch)
        run(here, op, micro_batch=micro_batch)
        expected = expected - set(consumes(one, STAGES)) | set(provides(one))
        assert here.held() == expected and set(here) == expected


def test_who_lacks_something_is_told_what_and_nothing_is_computed():
    here = store()
    assert here.missing(instruction(Op.I)) == [datum("stash"), datum("grad", stage=STAGE + 1)]
    with pytest.raises(
        AssertionError,
        match=r"1I0\.0@7 needs stash of stage 1, micro-batch 0\.0, step 7, which seat 0\.1 does not have",
    ):
        here.run(instruction(Op.I), lambda one, have: pytest.fail("it was computed"))
    with pytest.raises(AssertionError, match="1F0.0@8 needs .*step 8"):
        here.run(instruction(Op.F, step=8), made)


def test_a_forward_with_weights_that_have_changed_is_refused():
    here = store()
    run(here, Op.F, Op.I, Op.W, Op.REDUCE, Op.STEP)
    here.arrive(datum("act", OTHER, stage=STAGE - 1), "from a peer", 0)
    with pytest.raises(AssertionError, match="needs params of stage 1, step 7"):
        here.run(instruction(Op.F, OTHER), made)


def test_what_nobody_needs_is_not_kept():
    first, last = StepStore(Seat(0, 0), 2), StepStore(Seat(0, 1), 2)
    first.conclude(Instruction(Op.I, 0, ONE, 1), made(Instruction(Op.I, 0, ONE, 1), first))
    last.conclude(Instruction(Op.F, 1, ONE, 1), made(Instruction(Op.F, 1, ONE, 1), last))
    assert {each.kind for each in first.held()} == {"inner", "params"}
    assert {each.kind for each in last.held()} == {
        "stash",
        "params",
    }


def test_a_weight_gradient_is_counted_once():
    here = store()
    run(here, Op.F, Op.B)
    run(here, Op.F)
    with pytest.raises(AssertionError, match=r"the wgrad of stage 1, micro-batch 0\.0, step 7 would be counted twice"):
        run(here, Op.B)
    here = store()
    run(here, Op.F, Op.B)
    run(here, Op.REDUCE)
    assert not here.of("wgrad", STEP) and here[datum("reduced", None)]


def test_a_bare_instruction_leaves_the_boundary_tensor_alone():
    here = store()
    run(here, Op.F, Op.I)
    before = here.held()
    run(here, Op.F, boundary_only=True)
    assert here.held() == before
    run(here, Op.F)
    run(here, Op.I, boundary_only=True)
    assert here.held() == before, "the pending weight gradient of the same micro-batch stays"


def test_a_step_whose_weights_are_tied_needs_the_sum_over_stages():
    tied, plain = (StepStore(Seat(0, STAGE), STAGES, tied=each) for each in (True, False))
    for here in (tied, plain):
        here.put(datum("reduced", None, 1))
    assert tied.missing(instruction(Op.STEP, step=1)) == [datum("tied", None, 1)]
    assert not plain.missing(instruction(Op.STEP, step=1))


def test_data_that_is_drawn_is_waited_for_as_is_what_is_evaluated():
    here = store()
    assert not here.missing(instruction(Op.LOAD))
    assert here.missing(instruction(Op.LOAD, step=-1)) == [datum("drawn", step=-1)]
    here.reads_iterator = True
    assert here.missing(instruction(Op.LOAD)) == [datum("drawn")]
    here.put(datum("drawn"), "a batch")
    here.run(instruction(Op.LOAD), lambda one, have, boundary_only: {datum("data"): have[datum("drawn")]})
    assert here[datum("data")] == "a batch" and datum("drawn") in here and here.held() == {params()}
    here.commit(STEP)
    assert set(here) == {params()}


# --- commit, undo, void -----------------------------------------------------------------------------


def test_a_committed_step_leaves_the_weights_behind_it_and_what_comes_late_is_not_taken():
    here = store()
    run(here, Op.F, Op.B, Op.REDUCE, Op.STEP)
    run(here, Op.F, step=STEP + 1)
    later = {each for each in here if each.step == STEP + 1}
    here.commit(STEP)
    assert set(here) == later and params(STEP + 1) in later
    assert not here.arrive(datum("grad", OTHER, stage=STAGE + 1), "late", here.valid_from) and set(here) == later
    assert here.arrive(datum("grad", OTHER, STEP + 1, STAGE + 1), "early", here.valid_from)


def test_an_earlier_commit_said_late_changes_nothing():
    here = store(committed=STEP)
    here.commit(STEP - 2)
    assert here.committed == STEP and not here.arrive(datum("act", step=STEP, stage=0), "late", 0)


def test_a_step_that_is_taken_back_takes_the_later_stashes_with_it():
    here = store()
    run(here, Op.F, Op.I, Op.W, Op.REDUCE, Op.STEP)
    run(here, Op.F, step=STEP + 1)
    run(here, Op.F, Op.I, micro_batch=OTHER, step=STEP + 1)
    before = set(here)
    here.undo(STEP)
    gone = {datum("stash", step=STEP + 1), params(STEP + 1)}
    assert set(here) == before - gone | {params()} and here[params()] == "weights of 7"


def test_the_weights_of_a_step_that_is_applied_again_are_the_new_ones():
    here = store()
    for value in ("first", "second"):
        run(here, Op.F, Op.B) if value == "first" else None
        here.put(datum("reduced", None))
        here.conclude(instruction(Op.STEP), {params(STEP + 1): value})
        assert here[params(STEP + 1)] == value
        if value == "first":
            here.undo(STEP)
    here.undo(STEP)
    assert here[params()] == "weights of 7"


def test_a_step_loses_the_stashes_that_a_later_failure_has_made_needless():
    here = store()
    run(here, Op.F)
    run(here, Op.F, Op.B, micro_batch=OTHER)
    run(here, Op.REDUCE, Op.STEP)
    assert not any(each.kind == "stash" for each in here)


def test_what_was_computed_with_rejected_weights_is_void_wherever_it_comes_from():
    here = store()
    run(here, Op.F, Op.B, Op.REDUCE, Op.STEP)
    run(here, Op.F, step=STEP + 1)
    here.put(datum("drawn", step=STEP + 1))
    here.arrive(datum("grad", OTHER, STEP + 1, STAGE + 1), "of rejected weights", 0)
    here.arrive(datum("act", OTHER, STEP + 1, STAGE - 1), "of the right ones", 4)
    gone = here.discard_after(STEP, valid_from=4)
    assert gone == {
        datum("act", step=STEP + 1),
        datum("stash", step=STEP + 1),
        datum("grad", OTHER, STEP + 1, STAGE + 1),
    }
    assert {
        params(STEP + 1),
        datum("drawn", step=STEP + 1),
        datum("reduced", None),
        datum("act", OTHER, STEP + 1, STAGE - 1),
    } <= set(here)
    assert not here.arrive(datum("grad", step=STEP + 1, stage=STAGE + 1), "late", 3)
    run(here, Op.F, step=STEP + 1)
    assert not here.discard_after(STEP, valid_from=4), "what was made in this era is not of an earlier one"


def test_a_checkpoint_takes_the_place_of_everything():
    here = store()
    run(here, Op.F)
    here.rewind(2, valid_from=9)
    assert set(here) == {params(3)} and here.committed == 2
    assert not here.arrive(datum("act", step=3, stage=0), "of the first time", 8)
    assert here.arrive(datum("act", step=3, stage=0), "again", 9)


def test_evaluations_have_steps_of_their_own_and_need_no_weights():
    here = store()
    here.arrive(datum("act", step=-2, stage=STAGE - 1), "of the second", 0)
    here.run(instruction(Op.F, step=-2), made, boundary_only=True)
    assert datum("act", step=-2) in here and here.held() == {params()}
    here.put(datum("act", step=-3))
    here.forget_evaluation(-2)
    assert set(here) == {params(), datum("act", step=-3)}
    here.put(datum("act", step=-2))
    here.forget_evaluation(-3)
    assert set(here) == {params()}, "what came late for the one before, too"


# --- room -------------------------------------------------------------------------------------------


class Bytes:
    """A tier whose values are their weights."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def keep(self, value):
        return f"{value}{self.name}"

    def weigh(self, kept):
        return 10


def act(index: int, step: int = STEP) -> Datum:
    return datum("act", MicroBatch(0, index), step)


def filled(budget: int | None, sent: int, waiting: int = 0) -> StepStore:
    here = store(budget=budget, tiers=(Bytes(), Bytes(" on the host")))
    for index in range(sent + waiting):
        here.put(act(index), index)
        if index < sent:
            here.sent(act(index))
    return here


def kept(here: StepStore) -> set[Datum]:
    return here.held() - {params()}


def test_without_a_budget_everything_stays_until_its_step_is_committed():
    here = filled(None, 5)
    here.put(act(0, STEP + 1))
    assert kept(here) == {*map(act, range(5)), act(0, STEP + 1)} and (here.peak_weight, here.let_go) == (60, 0)
    here.commit(STEP)
    assert kept(here) - {params(STEP + 1)} == {act(0, STEP + 1)} and here.peak_weight == 60 and here.weight == 10


@pytest.mark.parametrize("budget, stay", [(0, 0), (9, 0), (10, 1), (31, 3), (50, 5)])
def test_past_the_budget_the_oldest_go(budget, stay):
    here = filled(budget, 5)
    assert kept(here) == set(map(act, range(5 - stay, 5))) and here.let_go == 5 - stay


def test_what_has_not_been_sent_stays_whatever_the_budget():
    here = filled(1, sent=0, waiting=3)
    assert kept(here) == set(map(act, range(3))) and here.let_go == 0
    assert here.sent(act(1)) == 1 and kept(here) == {act(0), act(2)}


def test_what_is_made_again_takes_the_old_ones_place():
    here = filled(20, 2)
    here.put(act(0), "again")
    assert here[act(0)] == "again" and here.peak_weight == 20
    here.put(act(2))
    here.sent(act(2))
    assert kept(here) == {act(0), act(2)}, "the first is not sent any more, so the second is the oldest that is"


def test_what_peers_have_been_told_of_stays_until_it_is_sent_once_more():
    """What was waiting takes the room of what was sent before, and recovery sends both, in any order."""
    here = filled(20, sent=2, waiting=1)
    assert kept(here) == set(map(act, range(3)))
    for index in (1, 2, 0):
        here.sent(act(index))
    assert kept(here) == {act(2), act(0)} and here.let_go == 1


def test_what_arrives_weighs_nothing():
    here = filled(10, sent=1)
    here.arrive(datum("act", OTHER, stage=STAGE - 1), "from a peer", 0)
    assert here.weight == 10 and here.let_go == 0


def test_a_tensor_is_sent_from_the_memory_that_it_is_sent_from():
    here = filled(None, 1)
    assert here.move(act(0), -1) == "0 on the host" == here[act(0)]


def test_the_most_micro_batches_that_were_at_work():
    here = store()
    for index in range(3):
        run(here, Op.F, micro_batch=MicroBatch(0, index))
    for index in range(3):
        run(here, Op.I, micro_batch=MicroBatch(0, index))
    assert here.peak == 3
    for index in range(3):
        run(here, Op.W, micro_batch=MicroBatch(0, index))
    run(here, Op.F, micro_batch=OTHER)
    assert here.peak == 3


def test_a_copy_lives_on_its_own():
    here = store()
    run(here, Op.F)
    other = here.copy()
    run(other, Op.I)
    other.sent(datum("act"))
    assert datum("stash") in here and datum("inner") not in here and not here.spare and other.spare


# --- sums -------------------------------------------------------------------------------------------


def summed(step: int, here: StepStore) -> None:
    for kind in ("reduced", "tied", "norm"):
        here.put(datum(kind, None, step), f"{kind} of {step}")


def test_sums_of_committed_steps_go_alone():
    """What else is here of their step stays until it is committed here too, and so do later sums."""
    here = store()
    run(here, Op.F)
    for step in (STEP, STEP + 1):
        summed(step, here)
    before = set(here)
    here.drop_sums(STEP - 1)
    assert set(here) == before
    here.drop_sums(STEP)
    assert before - set(here) == {datum("reduced", None), datum("tied", None)}
    here.drop_sums(STEP)
    here.commit(STEP)
    assert datum("norm", None) not in here and datum("reduced", None, STEP + 1) in here


def test_a_sum_that_was_dropped_otherwise_is_not_dropped_again():
    here = store()
    summed(STEP, here)
    other = here.copy()
    here.commit(STEP)
    here.drop_sums(STEP)
    assert here.get(datum("reduced", None)) is None
    other.drop_sums(STEP)
    assert datum("tied", None) not in other and datum("norm", None) in other
