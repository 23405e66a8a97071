"""Failures in virtual time: the weights are those of the fault-free run, whoever dies wherever; what a failure
costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.planner.machine_costs import LOCAL, by_name
from recycle_plugin.lab.simulator import ExactWorld, predict, train
from recycle_plugin.lab.simulator.campaign import initial_weights
from recycle_plugin.lab.simulator.simulated_job import SimulatedJob
from recycle_plugin.planner import PlanError, lowered, plan
from recycle_plugin.render.grid import draw
from tests.support.planned import jobs

STEPS = 3
FREE = by_name("free")
SHAPE = Topology(3, 3, 4)
COSTS = CostModel.uniform(3, 100, 100, 100, 10, 20, 30)


@st.composite
def histories(draw: st.DrawFn):
    """A job, two kills that leave it alive at random instants or instructions, and a machine."""
    view, costs, policy = draw(jobs())
    machine = draw(
        st.sampled_from([FREE, replace(LOCAL, detection_us=7, regroup_us=3, plan_us=1, undo_us=2, commit_us=4)])
    )
    live, faults, deaths = set(view.live), [], {}
    for _ in range(draw(st.integers(1, 2))):
        seats = sorted(seat for seat in live if sum(other.stage == seat.stage for other in live) > 1)
        if not seats:
            break
        seat = draw(st.sampled_from(seats))
        live.discard(seat)
        if draw(st.booleans()):
            deaths[seat] = draw(st.integers(0, 400))
        else:
            step = draw(st.integers(0, STEPS - 1))
            program = lowered(plan(view, costs, policy), seat, step)
            faults.append(
                Fault("kill", seat, draw(st.sampled_from(["before", "after"])), str(draw(st.sampled_from(program))))
            )
    return (
        SimulatedJob(view, costs, policy, machine, keep=draw(st.integers(0, 4)) > 0),
        faults,
        deaths,
        draw(st.integers(0, 7)),
    )


def torn_by(number: int) -> Callable[[Seat, Instruction], bool]:
    """Whom a peer's death in a REDUCE leaves without the result: one in so many replicas, none for 0."""
    return lambda seat, instruction: bool(number) and (seat.replica + instruction.step) % number == 0


@given(histories())
@settings(max_examples=150)
def test_killed_anywhere_the_weights_are_those_of_the_fault_free_run(history) -> None:
    job, faults, deaths, torn = history
    shape, stages = job.view.topology, job.view.topology.stages
    weights = initial_weights(shape)
    expected = train(plan(shape.full(), CostModel.uniform(stages), Policy()), CostModel.uniform(stages), weights, STEPS)
    ran = job.run(
        STEPS, faults, deaths, ExactWorld, {seat: weights[seat.stage] for seat in job.view.live}, torn_by(torn)
    )
    gone = {seat for loss in ran.losses for seat in loss.seats}
    victims = set(deaths) | {fault.seat for fault in faults}
    assert gone <= victims and job.view.live - set(ran.parameters) <= victims
    assert ran.parameters and not gone & set(ran.parameters)
    assert all(value == expected[seat] for seat, value in ran.parameters.items())
    assert sorted(ran.commits) == list(range(STEPS))
    assert all(one <= two for one, two in zip(list(ran.commits.values()), list(ran.commits.values())[1:]))


def test_a_kill_is_paid_for() -> None:
    """The second step's commit comes later by detection, regrouping, planning and what is run again: all of the step
    where nothing is kept, and otherwise what died with the worker.
    """
    machine = replace(LOCAL, detection_us=70, regroup_us=30, plan_us=11, commit_us=0)
    job = SimulatedJob(SHAPE.full(), COSTS, Policy(), machine)
    fault = Fault.parse("kill 1.2 before 2I1.2@1")
    calm, lost, restarted = job.run(4), job.run(4, [fault]), replace(job, keep=False).run(4, [fault])
    (loss,), (again,) = lost.losses, restarted.losses
    assert loss.seats == (Seat(1, 2),) and loss.detected_us == loss.died_us + 70 and loss.committed == 0
    assert loss.resumed_us >= loss.detected_us + 41
    assert lost.commits[0] == restarted.commits[0] == calm.commits[0]
    degraded = predict(plan(SHAPE.full().without(Seat(1, 2)), COSTS, Policy()), COSTS)
    assert restarted.commits[1] == again.resumed_us + degraded.first_step_us
    assert lost.commits[1] < restarted.commits[1]
    done = [
        span
        for span in calm.spans
        if span.seat == Seat(1, 2) and span.instruction.step == 1 and span.end_us <= loss.died_us
    ]
    assert loss.redone_us == compute_us(done)
    finished = [span for span in restarted.spans if span.instruction.step == 1 and span.end_us <= again.resumed_us]
    assert again.redone_us == compute_us(finished) > 5 * loss.redone_us


def test_at_random_instants_little_more_is_run_again_than_the_lost_worker_had_finished() -> None:
    """4 stages x 3 replicas: never more than a worker's share of the step, where a step that starts anew runs half of
    it again.
    """
    job = SimulatedJob(Topology(3, 4, 6).full(), CostModel.uniform(4, 20_000, 20_000, 20_000), Policy(), LOCAL)
    commits, random, whole = job.run(4).commits, Random(1), 3 * 6 * 4 * 60_000
    again, restarted, finished = [], [], []
    for _ in range(24):
        seat, at = random.choice(sorted(job.view.live)), random.randrange(commits[0], commits[2])
        ran = job.run(4, deaths={seat: at})
        again.append(ran.losses[0].redone_us / whole)
        restarted.append(replace(job, keep=False).run(4, deaths={seat: at}).losses[0].redone_us / whole)
        finished.append(
            compute_us([s for s in ran.spans if s.seat == seat and s.instruction.step > ran.losses[0].committed])
            / whole
        )
    assert mean(again) <= 1.1 * mean(finished) and max(again) <= 0.084
    assert 0.3 < mean(restarted) < 0.7


def compute_us(spans: list[Span]) -> int:
    return sum(span.end_us - span.start_us for span in spans if span.instruction.op in COMPUTE)


def test_dying_while_the_others_regroup_is_one_change() -> None:
    machine = replace(LOCAL, detection_us=100, regroup_us=50, plan_us=10, commit_us=0)
    first, second = Seat(0, 0), Seat(2, 1)
    ran = SimulatedJob(SHAPE.full(), COSTS, Policy(), machine).run(3, deaths={first: 500, second: 680})
    (loss,) = ran.losses
    assert loss.seats == (first, second) and loss.resumed_us >= 680 + 100 + 60


def test_the_same_faults_give_the_same_spans() -> None:
    job = SimulatedJob(SHAPE.full(), COSTS, Policy(), LOCAL)
    faults = [Fault.parse("kill 0.1 after 1F0.2@1")]
    assert job.run(3, faults).spans == job.run(3, faults).spans


def test_a_stage_without_workers_ends_the_job() -> None:
    with pytest.raises(PlanError, match="stage 1"):
        SimulatedJob(SHAPE.full(), COSTS, Policy(), LOCAL).run(
            3, deaths={Seat(replica, 1): 100 + replica for replica in range(3)}
        )


def test_a_step_is_applied_only_once_the_one_before_is_committed() -> None:
    """News of a commit that takes longer than a step holds every step back."""
    calm, slow = (
        SimulatedJob(SHAPE.full(), COSTS, Policy(), replace(FREE, commit_us=late)).run(4) for late in (0, 50_000)
    )
    assert slow.commits[0] == calm.commits[0]
    assert all(slow.commits[step + 1] >= slow.commits[step] + 50_000 for step in range(3))


def test_grid_of_a_kill(golden) -> None:
    """Worker 0.1 dies within its second backward; 3 ticks to detect and regroup, then 1.1 does what died with it."""
    machine = replace(FREE, detection_us=10, regroup_us=20)
    costs = CostModel.uniform(2, 10, 10, 10)
    ran = SimulatedJob(Topology(2, 2, 2).full(), costs, Policy(), machine).run(
        2, [Fault.parse("kill 0.1 before 1I0.1@1")]
    )
    golden("simulated_kill.txt", draw(ran.spans, tick_us=10))
