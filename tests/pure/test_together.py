"""The staggered optimizer, and what 'not staggered' means everywhere: no stage steps before all stages have their
gradients.

``python -m tests.pure.test_together 2500`` replays the plans of so many random jobs, larger than Hypothesis's.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology, tied
from recycle_plugin.lab.planner.machine_costs import LOCAL
from recycle_plugin.lab.simulator import simulate
from recycle_plugin.lab.simulator.simulated_job import SimulatedJob
from recycle_plugin.planner import plan
from recycle_plugin.planner.assemble import timeline
from tests.support.planned import EXAMPLE, LOST, jobs, wide_jobs

TOGETHER = Policy(activation_cap=8, stagger_optimizer=False)
STEPS = 8


def stepped(planned: Plan, costs: CostModel) -> list[list[int]]:
    """When each stage has stepped, step by step, in a replay of the plan."""
    ends = [[0] * STEPS for _ in range(planned.stages)]
    for span in simulate(planned, costs, STEPS):
        if span.instruction.op is Op.STEP:
            stage, step = span.seat.stage, span.instruction.step
            ends[stage][step] = max(ends[stage][step], span.end_us)
    return ends


def check(view: ClusterView, costs: CostModel, policy: Policy) -> None:
    """A replay takes what the plan says, and never less than the bound."""
    planned = plan(view, costs, policy)
    assert planned.bound_us <= planned.period_us
    ends = stepped(planned, costs)
    assert max(late[-1] - late[0] for late in ends) >= (STEPS - 1) * planned.bound_us, "a replay beats the bound"
    half = STEPS // 2
    if policy.together:
        assert all(two - one == planned.period_us for late in ends for one, two in zip(late, late[1:])), (
            "a replay takes another time than planned"
        )
    else:
        assert (
            max(late[-1] for late in ends) - max(late[half] for late in ends) <= (STEPS - 1 - half) * planned.period_us
        ), "slower than planned"


def random_job(random: Random) -> tuple[ClusterView, CostModel, Policy]:
    """With ties, losses, uneven costs, and caps from tight to roomy; not staggered in two of three."""
    stages, replicas = random.randint(1, 6), random.randint(1, 4)
    shape = Topology(replicas, stages, random.randint(1, 8))
    if stages > 1:
        shape = replace(shape, ties=tied(random.sample(range(stages), 2) for _ in range(random.choice((0, 1, 1, 2)))))
    lost = [
        Seat(replica, stage)
        for stage in range(stages)
        for replica in random.sample(range(replicas), random.choice((0, 0, 0, min(1, replicas - 1))))
    ]

    def row(least: int, most: int) -> tuple[int, ...]:
        return (
            tuple(random.randint(least, most) for _ in range(stages))
            if random.random() < 0.7
            else (random.randint(least, most),) * stages
        )

    costs = CostModel(
        row(1, 6),
        row(0, 6),
        row(0, 6),
        random.choice((0, 0, 2)),
        row(0, 4),
        row(0, 6),
        random.choice((0, 0, 1)),
        tie=random.randint(0, 4),
    )
    cap = random.choice((None, "1f1b", random.randint(1, 2 * stages)))
    policy = Policy(
        random.random() < 0.8,
        random.random() < 1 / 3,
        True,
        cap,
        random.random() < 0.3,
        block=random.choice((1, 1, 2, None)),
    )
    return shape.full().without(*lost), costs, policy


def test_so_it_is_for_random_jobs() -> None:
    for seed in range(60):
        check(*random_job(Random(seed)))


@given(jobs() | wide_jobs())
@settings(max_examples=150)
def test_a_replay_takes_what_the_plan_says_and_no_less_than_the_bound(job) -> None:
    check(*job)


def test_ties_of_stages_that_end_early_cost_nothing_where_all_step_together() -> None:
    """The bound added the longest tie behind the last of all ends, also where that is another stage's: 29, and a replay
    takes 27.
    """
    view = Topology(3, 5, 5, ((2, 4),)).full().without(Seat(2, 0))
    costs = replace(CostModel.uniform(5, step=1), tie=2)
    planned = plan(view, costs, Policy(activation_cap=7, stagger_optimizer=False))
    assert (planned.bound_us, planned.period_us) == (27, 27)
    check(view, costs, planned.policy)


def test_a_stage_that_has_stepped_does_not_wait_for_the_others_steps() -> None:
    """Together they begin to step; the next step's forwards wait for their own stage alone."""
    costs = replace(CostModel.uniform(2, 10, 10, 10), step=(1, 50))
    spans = {
        str(span.instruction): span for span in simulate(plan(Topology(1, 2, 3).full(), costs, TOGETHER), costs, 2)
    }
    assert spans["0STEP"].start_us == spans["1STEP"].start_us
    assert spans["0F0.0@1"].start_us == spans["0STEP"].end_us < spans["1STEP"].end_us


@pytest.mark.parametrize(
    "policy",
    (Policy(activation_cap=8), TOGETHER, Policy(activation_cap=8, validate=True)),
    ids=("staggered", "together", "norm"),
)
def test_in_plan_and_replay_steps_begin_together_or_not(policy) -> None:
    costs = CostModel.uniform(4, 10, 10, 10, reduce=20, step=10)
    planned = plan(EXAMPLE.full().without(LOST), costs, policy)
    for spans in (timeline(planned, costs), simulate(planned, costs, 1)):
        begins = {span.start_us for span in spans if span.instruction.op is Op.STEP}
        reduced = max(span.end_us for span in spans if span.instruction.op is Op.REDUCE)
        assert (begins == {reduced}) == policy.together
        assert policy.together or min(begins) < reduced


@pytest.mark.parametrize(
    "fault",
    ("kill 1.2 before 2I0.3@1", "kill 0.1 before 1REDUCE@1", "kill 2.3 before 3STEP@1", "kill 2.0 after 0STEP@1"),
)
def test_nobody_steps_early_in_a_recovery_either(fault) -> None:
    costs = CostModel.uniform(4, 10, 10, 10, reduce=20, step=10)
    ran = SimulatedJob(EXAMPLE.full(), costs, TOGETHER, LOCAL).run(3, (Fault.parse(fault),))
    for step in range(3):
        spans = [span for span in ran.spans if span.instruction.step == step]
        begins = min(span.start_us for span in spans if span.instruction.op is Op.STEP)
        for stage in range(4):
            assert begins >= min(
                span.end_us for span in spans if span.instruction == Instruction(Op.REDUCE, stage, None, step)
            )


if __name__ == "__main__":
    count = int(sys.argv[1])
    for number in range(count):
        check(*random_job(Random(number)))
    print(f"{count} jobs: each replay took what was planned, and no less than the bound")
