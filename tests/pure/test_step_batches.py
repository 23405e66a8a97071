"""Which replicas a step has where batches shrink: what is decided of begun steps when a replica is lost, and what of a
worker's data counts then.
"""

from __future__ import annotations

from math import sqrt

import pytest

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.coordinator.facts.step_ledger import StepLedger
from recycle_plugin.core.messages.contributions import EACH, LOSS, MEAN, NORM
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import Collected, Resume
from recycle_plugin.core.messages.from_workers import Contribution, SurvivorReport
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.packed_data import pack
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.step_batches import LiveShare, StepBatches
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.planner import PlanError, PlanStore, lowered, plan, recover, verify
from tests.support.membership import said, started

FULL, LEFT, SHAPE = StepBatches.full(3), (0, 2), Topology(3, 2, 2)
STEP = 7


def datum(kind: str, stage: int, micro_batch: str | None = None, step: int = STEP) -> Datum:
    return Datum(kind, stage, None if micro_batch is None else MicroBatch.parse(micro_batch), step)


def survivors(*more: tuple[Seat, Datum]) -> dict[Seat, frozenset[Datum]]:
    """Of those left in the middle of a step, who have a weight gradient each."""
    held = {
        Seat(replica, stage): {datum("wgrad", stage, f"{replica}.0"), datum("params", stage)}
        for replica in LEFT
        for stage in range(2)
    }
    for seat, each in more:
        held[seat].add(each)
    return {seat: frozenset(have) for seat, have in held.items()}


def test_what_a_share_comes_to():
    assert LiveShare(2, 3).sum_factor == 1.5 and LiveShare(2, 3).rate_factor == sqrt(2 / 3)
    assert LiveShare(3, 3).whole and LiveShare().whole and LiveShare(3, 3).rate_factor == 1.0


SUM = {stage: (Seat(2, stage), datum("reduced", stage)) for stage in range(2)}


@pytest.mark.parametrize(
    "more, had, void",
    [
        pytest.param((), LEFT, STEP, id="nobody has a sum"),
        pytest.param((SUM[1],), LEFT, STEP, id="one stage has its sum"),
        pytest.param((SUM[0], SUM[1]), (0, 1, 2), 0, id="somebody has each stage's sum"),
        pytest.param(
            (SUM[1], (Seat(0, 1), datum("params", 1, step=STEP + 1))), (0, 1, 2), 0, id="somebody has applied it"
        ),
    ],
)
def test_what_the_lost_have_contributed_is_in_all_sums_or_in_none(more, had, void):
    found = FULL.changed(LEFT, STEP - 1, survivors(*more), 2)
    assert (found.of(STEP), found.void, found.of(STEP + 1)) == (had, void, LEFT)
    assert found.share(STEP) == (len(had), 3) and found.committed(STEP) == StepBatches(3, LEFT)


def test_of_a_step_that_nobody_has_begun_nothing_is_void():
    held = {seat: frozenset({datum("params", seat.stage)}) for seat in survivors()}
    assert FULL.changed(LEFT, STEP - 1, held, 2) == StepBatches(3, LEFT)
    assert StepBatches(3, LEFT).changed((0, 1, 2), STEP - 1, held, 2) == FULL, "somebody has come back"


def test_a_second_loss_is_decided_from_what_was_decided_before():
    kept = FULL.changed(LEFT, STEP - 1, survivors(SUM[0], SUM[1]), 2)
    left = {seat: have for seat, have in survivors(SUM[0], SUM[1]).items() if seat.replica == 2}
    assert kept.changed((2,), STEP - 1, left, 2).of(STEP) == (0, 1, 2)
    without = {seat: have - {datum("reduced", seat.stage)} for seat, have in left.items()}
    assert kept.changed((2,), STEP - 1, without, 2).of(STEP) == (2,)


def interrupted(*more: tuple[Seat, Datum]) -> dict[Seat, frozenset[Datum]]:
    """Of those left once more, of whom the worker at 0.0 never took up that the step is void."""
    held = survivors(*more)
    return held | {Seat(0, 0): held[Seat(0, 0)] | {datum("wgrad", 0, "1.0")}}


@pytest.mark.parametrize("more", ((), (SUM[0], SUM[1])), ids=("no sums", "of each stage one sum"))
@pytest.mark.parametrize("left", (LEFT, (2,), (0, 1, 2)), ids=str)
def test_a_void_step_stays_void_until_somebody_has_applied_it(more, left):
    void = FULL.changed(LEFT, STEP - 1, survivors(), 2)
    again = void.changed(left, STEP - 1, interrupted(*more), 2, heard=False)
    assert (again.void, again.of(STEP)) == (STEP, left)
    here = interrupted(*more)[Seat(0, 0)]
    assert (datum("wgrad", 0, "1.0") in again.gone(here)) == (1 not in left)
    assert not any(each.kind == "reduced" for each in here - again.gone(here))


def test_a_void_step_that_somebody_has_applied_is_void_no_longer():
    void = FULL.changed(LEFT, STEP - 1, survivors(), 2)
    applied = survivors(SUM[0], SUM[1], (Seat(0, 1), datum("params", 1, step=STEP + 1)))
    assert void.changed(LEFT, STEP - 1, applied, 2, heard=False).void == 0
    assert (after := void.changed((2,), STEP - 1, applied, 2, heard=False)).of(STEP) == LEFT and after.void == 0


def test_the_commit_of_the_step_before_leaves_a_step_void():
    applied = {seat: have | {datum("params", seat.stage, step=STEP + 1)} for seat, have in survivors().items()}
    begun = {seat: have | {datum("wgrad", seat.stage, "0.1", STEP + 1)} for seat, have in applied.items()}
    void = FULL.changed(LEFT, STEP - 1, begun, 2)
    assert (void.of(STEP), void.void) == ((0, 1, 2), STEP + 1)
    assert void.committed(STEP).void == void.changed(LEFT, STEP, begun, 2, heard=False).void == STEP + 1
    assert void.committed(STEP + 1) == StepBatches(3, LEFT)


def test_with_a_void_sum_goes_what_is_in_it_and_other_sums_stay():
    found = FULL.changed(LEFT, STEP - 1, survivors(SUM[1]), 2)
    norm, act = datum("norm", 1), datum("act", 1, "2.1")
    summed = {datum("reduced", 1), norm, act, datum("params", 1)}
    assert found.gone(summed) == {datum("reduced", 1), norm}
    assert found.gone({datum("wgrad", 0, "0.0"), datum("inner", 0, "0.1"), act}) == set(), "what was added up so far"
    strange = {datum("wgrad", 0, "1.0"), datum("wgrad", 0, "0.0"), datum("inner", 0, "0.1"), datum("stash", 0, "0.1")}
    assert found.gone(strange) == strange - {datum("stash", 0, "0.1")}, "nothing can be taken out of a sum"
    assert found.gone({datum("act", 0, "1.0")}) == {datum("act", 0, "1.0")}
    assert FULL.gone(strange) == set()


def test_what_is_left_of_a_void_step_is_added_up_again_without_the_lost():
    costs = CostModel.uniform(2)
    given = plan(SHAPE.full().without(Seat(1, 0), Seat(1, 1)), costs, Policy(shrinks=True))
    batches = FULL.changed(LEFT, STEP - 1, survivors(SUM[1]), 2)
    recovery = recover(given, costs, STEP, batches.counting(survivors(SUM[1])), batches)
    computed = {str(one.micro_batch) for seat in given.programs for one in recovery.computed(seat)}
    assert computed <= {"0.0", "0.1", "2.0", "2.1"} and not recovery.holders and not recovery.undo
    assert all(closing[0].op is Op.REDUCE for closing in recovery.closing.values())


@pytest.mark.parametrize(
    "adopted, had, void",
    [
        pytest.param((1, 1), (0, 1, 2), 0, id="both have gone on: the sum was made since"),
        pytest.param((1, 0), (0, 1), 1, id="one has not: the sum may be that of before"),
        pytest.param((0, 0), (0, 1), 1, id="nobody has"),
    ],
)
def test_who_has_not_gone_on_with_the_last_generation_has_not_heard_what_is_void(adopted, had, void):
    """The coordinator reads so from the reports of a second loss in the same step."""
    membership = started(replicas=4, stages=1, unit="replica", policy=Policy(shrinks=True))
    begun = [pack({datum("wgrad", 0, f"{replica}.0", step=1)}) for replica in range(3)]
    summed = pack({datum("reduced", 0, step=1)})

    def regrouped(generation: int, has_gone_on: tuple[int, ...], more: dict[str, str]) -> StepBatches:
        membership.connection_lost(WorkerId(len(has_gone_on)), 1.0)
        for rank, newest in enumerate(has_gone_on):
            report = SurvivorReport(rank, generation, 0, "plan", begun[rank] | more, adopted=newest)
            out = membership.receive(report, 1.0)
        (resume,) = said(out, Resume)
        assert resume.generation == generation
        return resume.batches

    assert regrouped(1, (0, 0, 0), {}).void == 1
    found = regrouped(2, adopted, summed)
    assert (found.of(1), found.void) == (had, void)


# --- plans ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ((1,), (0, 2)))
def test_a_plan_is_that_of_the_replicas_that_are_left(lost):
    policy, costs = Policy(shrinks=True), CostModel.uniform(2)
    gone = [Seat(replica, stage) for replica in lost for stage in range(2)]
    view, left = SHAPE.full().without(*gone), [replica for replica in range(3) if replica not in lost]
    found, small = plan(view, costs, policy), plan(Topology(len(left), 2, 2).full(), costs, policy)
    assert found.period_us == small.period_us and found.digest == PlanStore(costs, policy).plan(view).digest
    assert {one.replica for one in found.batch} == set(left)
    for number, replica in enumerate(left):
        for stage in range(2):
            assert [one.replica for one in found.own(Seat(replica, stage))] == [replica] * 2
            there = [str(one).replace(f"{number}.", "r.") for one in small.programs[Seat(number, stage)]]
            assert [str(one).replace(f"{replica}.", "r.") for one in found.programs[Seat(replica, stage)]] == there
            peers = {one.peer.replica for one in lowered(found, Seat(replica, stage), 1) if one.peer is not None}
            assert peers == {replica}
    assert all(len({found.route[stage, one].replica for stage in range(2)}) == 1 for one in SHAPE.batch)


def test_a_replica_that_is_lost_in_part_has_no_plan():
    with pytest.raises(PlanError, match="replica 1 is lost in part"):
        plan(SHAPE.full().without(Seat(1, 0)), CostModel.uniform(2), Policy(shrinks=True))
    every = Seat(0, 0), Seat(1, 0), Seat(2, 1)
    with pytest.raises(PlanError, match="no replica is whole"):
        plan(SHAPE.full().without(*every), CostModel.uniform(2), Policy(shrinks=True))


def test_losses_of_whole_replicas_are_planned_for_ahead():
    store = PlanStore(CostModel.uniform(2), Policy(shrinks=True), whole=True)
    assert {tuple(sorted({seat.replica for seat in view.lost})) for view in store.prepare(SHAPE.full())} == {(0,)}
    verify(store.plan(SHAPE.full()))


# --- what the coordinator has been told ---------------------------------------------------------------------


def test_losses_that_a_void_step_still_has_are_told_again_and_its_norm_is_asked_for_again():
    ledger, out = StepLedger(STEP - 1), CoordinatorOutput()
    losses = {f"{replica}.{index}": float(replica) for replica in range(3) for index in range(2)}
    ledger.contribute(Contribution(1, STEP, LOSS, losses, 6), out)
    ledger.contribute(Contribution(1, STEP, NORM, {"0": 1.0}, 2), out)
    batches, again = FULL.changed(LEFT, STEP - 1, survivors(SUM[1]), 2), CoordinatorOutput()
    ledger.without(batches, 2, again)
    assert said(again, Collected) == [Collected(STEP, LOSS, {MEAN: 1.0})]
    assert [event.details["loss"] for event in again.events if event.kind == "loss"] == [1.0]
    ledger.contribute(Contribution(2, STEP, NORM, {"1": 4.0}, 2), again)
    assert len(said(again, Collected)) == 1, "what was said of the void sum counts no more"


def test_losses_that_are_known_so_far_are_complete_with_fewer():
    ledger, out = StepLedger(STEP - 1), CoordinatorOutput()
    logged = {"lm loss": (1.0, 2.0)}
    losses = {"0.0": (1.0, logged), "0.1": (1.0, logged), "2.0": (3.0, logged), "1.0": (9.0, logged)}
    ledger.contribute(Contribution(0, STEP, LOSS, losses, 6), out)
    ledger.without(FULL.changed(LEFT, STEP - 1, survivors(), 2), 2, out)
    assert not said(out, Collected)
    ledger.contribute(Contribution(2, STEP, LOSS, {"2.1": (3.0, logged)}, 4), out)
    each = {"0.0": (1.0, logged), "0.1": (1.0, logged), "2.0": (3.0, logged), "2.1": (3.0, logged)}
    assert said(out, Collected) == [Collected(STEP, EACH, each), Collected(STEP, LOSS, {MEAN: 2.0})]


def test_losses_of_the_lost_leave_a_step_that_no_survivor_has_begun():
    ledger, out = StepLedger(STEP - 1), CoordinatorOutput()
    ledger.contribute(Contribution(1, STEP, LOSS, {f"1.{index}": 9.0 for index in range(2)}, 6), out)
    decided = FULL.changed(LEFT, STEP - 1, {seat: frozenset() for seat in survivors()}, 2)
    assert decided == StepBatches(3, LEFT)
    ledger.without(decided, 2, out)
    for replica in LEFT:
        losses = {f"{replica}.{index}": float(replica) for index in range(2)}
        ledger.contribute(Contribution(replica, STEP, LOSS, losses, 4), out)
    assert said(out, Collected) == [Collected(STEP, LOSS, {MEAN: 1.0})]


def test_losses_that_were_told_are_incomplete_once_a_replica_is_back():
    ledger, out = StepLedger(STEP - 1), CoordinatorOutput()
    left = FULL.changed(LEFT, STEP - 1, survivors(), 2)
    told = {f"{replica}.{index}": 1.0 for replica in LEFT for index in range(2)}
    ledger.contribute(Contribution(0, STEP, LOSS, told, 4), out)
    assert len(said(out, Collected)) == 1
    ledger.without(left.changed((0, 1, 2), STEP - 1, survivors(), 2), 2, out)
    assert len(said(out, Collected)) == 1
    ledger.contribute(Contribution(1, STEP, LOSS, {"1.0": 4.0, "1.1": 4.0}, 6), out)
    assert said(out, Collected)[1:] == [Collected(STEP, LOSS, {MEAN: 2.0})]


def test_the_decision_travels():
    decided = FULL.changed(LEFT, STEP - 1, survivors(SUM[0], SUM[1]), 2)
    assert decode(encode(Resume(3, STEP - 1, batches=decided))) == Resume(3, STEP - 1, batches=decided)
