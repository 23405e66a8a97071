"""The virtual world: predictions, deadlocks, exact numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator import Deadlock, predict, simulate, train
from recycle_plugin.lab.simulator.campaign import initial_weights
from recycle_plugin.planner import plan
from tests.support.planned import EXAMPLE, LOST, STOCK, UNIT, crossed, jobs

WEIGHTS = (3, 5, 7, 11)


def test_running_example_keeps_its_period_in_the_simulator() -> None:
    costs = CostModel.uniform(4, reduce=2, step=1)
    for view in (EXAMPLE.full(), EXAMPLE.full().without(LOST)):
        planned = plan(view, costs, Policy(activation_cap=8))
        assert predict(planned, costs).period_us == planned.period_us


def test_stages_start_the_next_step_on_their_own() -> None:
    costs = CostModel.uniform(4, reduce=2, step=1)
    view = EXAMPLE.full().without(LOST)

    def overlap(policy: Policy) -> bool:
        spans = simulate(plan(view, costs, policy), costs, 2)
        first_of_next = min(span.start_us for span in spans if span.instruction.step == 1)
        return first_of_next < max(span.end_us for span in spans if span.instruction.step == 0)

    assert overlap(Policy(activation_cap=8))
    assert not overlap(Policy(activation_cap=8, stagger_optimizer=False))


def test_transfers_take_time_and_nobody() -> None:
    costs = CostModel.uniform(2, 10, 10, 10, communication=4)
    spans = {str(span.instruction): span for span in simulate(plan(Topology(1, 2, 1).full(), costs, STOCK), costs)}
    assert spans["1F0.0"].start_us == spans["0F0.0"].end_us + 4
    assert spans["0B0.0"].start_us == spans["1B0.0"].end_us + 4 == 10 + 4 + 30 + 4


def test_deadlock_says_who_waits_for_what() -> None:
    with pytest.raises(
        Deadlock,
        match="0.0 waits for grad of stage 1, micro-batch 0.1, step 0; 0.1 waits for act of stage 0, micro-batch 0.0",
    ):
        simulate(crossed(), CostModel.uniform(2))


@given(jobs(), st.integers(1, 3))
@settings(max_examples=40)
def test_weights_are_those_of_the_fault_free_run(job, steps: int) -> None:
    view, costs, policy = job
    stages = view.topology.stages
    weights = initial_weights(view.topology)
    fault_free = train(
        plan(view.topology.full(), CostModel.uniform(stages), STOCK), CostModel.uniform(stages), weights, steps
    )
    degraded = train(plan(view, costs, policy), costs, weights, steps)
    assert set(degraded) == set(view.live)
    assert all(weight == fault_free[seat] for seat, weight in degraded.items())


def test_a_dropped_micro_batch_changes_the_weights() -> None:
    """The negative control: the numbers notice."""
    good = plan(EXAMPLE.full(), UNIT, STOCK)
    dropped = {
        seat: tuple(one for one in program if one.micro_batch is None or one.micro_batch != (1, 5))
        for seat, program in good.programs.items()
    }
    route = dict(good.route)
    fewer = replace(good, programs=dropped)
    object.__setattr__(
        fewer, "own", lambda seat: tuple(mb for mb in EXAMPLE.batch if route[seat.stage, mb] == seat and mb != (1, 5))
    )
    assert train(fewer, UNIT, WEIGHTS) != train(good, UNIT, WEIGHTS)


def test_everything_runs_once_per_step() -> None:
    planned = plan(EXAMPLE.full().without(LOST), UNIT, Policy())
    spans = simulate(planned, UNIT, 2)
    for op in (Op.F, Op.I, Op.W):
        ran = [
            (span.instruction.step, span.instruction.stage, span.instruction.micro_batch)
            for span in spans
            if span.instruction.op is op
        ]
        assert sorted(ran) == sorted(
            (step, stage, mb) for step in range(2) for stage in range(4) for mb in EXAMPLE.batch
        )
