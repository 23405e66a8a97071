"""Stages that share weights: what that costs, what is left to do after a failure, and how ties are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology, tied
from recycle_plugin.lab.simulator import predict
from recycle_plugin.planner import plan, recover
from tests.support.planned import EXAMPLE, LOST, UNIT

ENDS = replace(EXAMPLE, ties=((0, 3),))
ROOMY = Policy(activation_cap=8)
STEP = 7


@pytest.mark.parametrize(
    "groups, ties",
    [
        ([], ()),
        ([[2]], ()),
        ([[3, 0], [0, 3]], ((0, 3),)),
        ([[2, 3], [0, 1]], ((0, 1), (2, 3))),
        ([[0, 1], [2, 3], [1, 2]], ((0, 1, 2, 3),)),
    ],
)
def test_groups_that_have_a_stage_in_common_are_one_tie(groups, ties) -> None:
    assert tied(groups) == ties and tied(reversed(groups)) == ties


@pytest.mark.parametrize("ties", (((0,),), ((3, 0),), ((0, 4),), ((0, 1), (1, 2)), ((2, 3), (0, 1))))
def test_ties_that_are_none_are_refused(ties) -> None:
    with pytest.raises(ValueError, match="topology.ties is"):
        replace(EXAMPLE, ties=ties)


def test_the_last_stage_waits_for_the_first_one_and_the_bound_knows_it() -> None:
    """The fault-free period of the running example goes from 19 to 21 slots: the last stage can't begin the next step
    while the first still has gradients to take.  After a loss the hurt stage is the narrower place.
    """
    free, coupled, degraded = (
        plan(view, UNIT, ROOMY) for view in (EXAMPLE.full(), ENDS.full(), ENDS.full().without(LOST))
    )
    assert (free.period_us, coupled.period_us, degraded.period_us) == (19, 21, 27)
    assert (free.bound_us, coupled.bound_us, degraded.bound_us) == (19, 21, 27)
    assert [predict(planned, UNIT, 8).period_us for planned in (free, coupled, degraded)] == [19, 21, 27]


def test_a_sum_over_stages_takes_its_time_in_each_of_them() -> None:
    costs = CostModel.uniform(4, reduce=2, step=1)
    planned = plan(ENDS.full(), replace(costs, tie=3), ROOMY)
    assert planned.period_us == planned.bound_us == 21 + 2 + 3 + 1
    assert [one.op for one in planned.programs[Seat(0, 3)][-3:]] == [Op.REDUCE, Op.TIE, Op.STEP]
    assert [one.op for one in planned.programs[Seat(0, 1)][-2:]] == [Op.REDUCE, Op.STEP]
    begins = {planned.starts[Seat(replica, stage)][-2] for replica in range(3) for stage in (0, 3)}
    assert len(begins) == 1, "a TIE is one joint event"


def held_by(planned, *kinds: str) -> dict[Seat, set[Datum]]:
    return {
        seat: {Datum(kind, seat.stage, None, STEP + (kind == "params")) for kind in kinds} for seat in planned.programs
    }


def closing(planned, held) -> dict[Seat, list[Op]]:
    recovery = recover(planned, UNIT, STEP, held)
    assert not any(map(recovery.computed, planned.programs)) and not recovery.undo
    return {seat: [one.op for one in ops] for seat, ops in recovery.closing.items()}


def test_who_lacks_the_tied_gradient_gets_it_from_all_that_share_it_and_nothing_is_run_again() -> None:
    """Also from who has stepped, who stays so; the other stages have nothing to do with it."""
    planned = plan(ENDS.full().without(LOST), UNIT, Policy())
    held = held_by(planned, "reduced", "tied", "params")
    held[Seat(2, 3)] = {Datum("reduced", 3, None, STEP), Datum("params", 3, None, STEP)}
    ops = closing(planned, held)
    assert ops.pop(Seat(2, 3)) == [Op.TIE, Op.STEP]
    assert all(found == ([Op.TIE] if seat.stage in (0, 3) else []) for seat, found in ops.items())


def test_a_stage_rolls_forward_before_its_tie_is_summed() -> None:
    planned = plan(ENDS.full().without(LOST), UNIT, Policy())
    held = held_by(planned, "reduced", "params")
    for seat, have in held.items():
        have -= {Datum("params", seat.stage, None, STEP + 1)}
        have |= {Datum("params", seat.stage, None, STEP)}
    held[Seat(1, 0)].discard(Datum("reduced", 0, None, STEP))
    ops = closing(planned, held)
    assert {stage: {tuple(ops[seat]) for seat in ops if seat.stage == stage} for stage in range(4)} == {
        0: {(Op.REDUCE, Op.TIE, Op.STEP)},
        1: {(Op.STEP,)},
        2: {(Op.STEP,)},
        3: {(Op.TIE, Op.STEP)},
    }


def test_where_all_have_it_nothing_is_summed_again() -> None:
    planned = plan(ENDS.full().without(LOST), UNIT, Policy())
    assert not any(closing(planned, held_by(planned, "reduced", "tied", "params")).values())


def test_a_tie_of_a_job_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="topology.ties is"):
        Topology(2, 2, 2, ((0, 3),))
