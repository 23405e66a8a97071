"""With everything switched off the order is DeepSpeed's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.planner import plan
from tests.support.planned import STOCK

SHAPES = [(1, 1), (1, 4), (2, 1), (2, 3), (4, 1), (4, 2), (4, 8), (5, 3), (8, 16)]


@pytest.mark.parametrize("stages, micro_batches", SHAPES)
def test_order_is_train_schedule(stages: int, micro_batches: int) -> None:
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    planned = plan(Topology(2, stages, micro_batches).full(), CostModel.uniform(stages, 3, 2, 2, 1), STOCK)
    names = {schedule.ForwardPass: "F", schedule.BackwardPass: "B"}
    for stage in range(stages):
        stock = schedule.TrainSchedule(micro_batches, stages, stage)
        theirs = [names[type(command)] for commands in stock.steps() for command in commands if type(command) in names]
        program = [one for one in planned.programs[Seat(1, stage)] if one.op in COMPUTE]
        assert [one.op.value for one in program] == theirs
        for op in "FB":
            assert [one.micro_batch.index for one in program if one.op.value == op] == list(range(micro_batches))


@pytest.mark.parametrize("stages, micro_batches", SHAPES)
def test_period_is_the_textbook_one(stages: int, micro_batches: int) -> None:
    planned = plan(Topology(2, stages, micro_batches).full(), CostModel.uniform(stages), STOCK)
    assert planned.period_us == 3 * (micro_batches + stages - 1)


def test_unsplit_and_fault_free_is_1f1b_whatever_else_is_on() -> None:
    view, costs = Topology(2, 4, 6).full(), CostModel.uniform(4)
    assert (
        plan(view, costs, Policy(split_backward=False)).digest
        == plan(view, costs, replace(STOCK, stagger_optimizer=True)).digest
    )


def test_a_cap_below_1f1b_is_kept() -> None:
    planned = plan(Topology(2, 4, 6).full(), CostModel.uniform(4), Policy(split_backward=False, activation_cap=2))
    assert planned.period_us > 27
