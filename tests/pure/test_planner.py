"""Plans: routes, figures of the running example, bounds, determinism."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import RECEIVES, SENDS, Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.planner import PlanError, lowered, plan
from recycle_plugin.planner.assemble import timeline
from recycle_plugin.planner.reroute import route
from recycle_plugin.render.grid import draw
from tests.support.planned import EXAMPLE, LOST, REROUTE, SPLIT, STOCK, UNIT, jobs, views

FULL, DEGRADED = EXAMPLE.full(), EXAMPLE.full().without(LOST)


def capped(policy: Policy, cap: int) -> Policy:
    return replace(policy, activation_cap=cap)


@pytest.mark.parametrize(
    "view, policy, period",
    [
        pytest.param(FULL, STOCK, 27, id="fault-free 1F1B"),
        pytest.param(DEGRADED, capped(REROUTE, 8), 33, id="adaptive, cap 2 PP"),
        pytest.param(DEGRADED, capped(SPLIT, 4), 29, id="split, cap PP"),
        pytest.param(DEGRADED, capped(SPLIT, 8), 29, id="split, cap 2 PP"),
        pytest.param(DEGRADED, capped(Policy(), 6), 27, id="split and staggered, cap 1.5 PP"),
        pytest.param(DEGRADED, capped(Policy(), 8), 27, id="split and staggered, cap 2 PP"),
    ],
)
def test_running_example(view: ClusterView, policy: Policy, period: int, golden, request) -> None:
    """ReCycle's figures 3 to 6: 27, 36, 29 and no loss, without the optimizer's three slots."""
    planned = plan(view, UNIT, policy)
    assert planned.period_us == period
    name = request.node.callspec.id.replace(",", "").replace(" ", "_")
    golden(f"{name}.txt", draw(timeline(planned, UNIT)))


def test_adaptive_alone_takes_36_with_the_memory_of_1f1b() -> None:
    assert plan(DEGRADED, UNIT, replace(REROUTE, activation_cap="1f1b")).period_us == 36
    assert plan(DEGRADED, UNIT, replace(REROUTE, activation_cap=(4, 3, 2, 1))).period_us == 36


def test_optimizer_time_is_added_once() -> None:
    costs = CostModel.uniform(4, reduce=2, step=1)
    assert plan(FULL, costs, STOCK).period_us == 30
    assert plan(DEGRADED, costs, capped(Policy(), 8)).period_us == 30


@pytest.mark.parametrize("replicas", [1, 2])
def test_split_backward_beats_1f1b_in_its_own_memory(replicas: int) -> None:
    """Zero-bubble's ZB-H1: 27 instead of 33, on the emulated job of issue 2."""
    view = Topology(replicas, 4, 8).full()
    assert plan(view, UNIT, STOCK).period_us == 33
    assert plan(view, UNIT, capped(Policy(), 4)).period_us == 27


def test_rerouted_micro_batches_are_dealt_out_in_turn() -> None:
    routed = route(DEGRADED, Policy()).named(DEGRADED)
    taken = [routed[2, MicroBatch(1, index)] for index in range(6)]
    assert sorted(set(taken)) == [Seat(0, 2), Seat(2, 2)] and all(one != two for one, two in zip(taken, taken[1:]))
    assert all(seat == Seat(mb.replica, stage) for (stage, mb), seat in routed.items() if (stage, mb.replica) != (2, 1))


@given(views(replicas=4))
def test_rerouted_load_is_even(view: ClusterView) -> None:
    routed = list(route(view, Policy()).named(view).values())
    loads = {seat: routed.count(seat) for seat in view.live}
    for stage in range(view.topology.stages):
        rank = [loads[Seat(replica, stage)] for replica in view.live_replicas(stage)]
        assert max(rank) - min(rank) <= 1 and min(rank) >= view.topology.micro_batches


def test_what_cannot_be_planned_is_named() -> None:
    with pytest.raises(PlanError, match="reroute"):
        plan(DEGRADED, UNIT, STOCK)
    with pytest.raises(PlanError, match="stage 2"):
        plan(FULL.without(*(Seat(replica, 2) for replica in range(3))), UNIT, Policy())
    with pytest.raises(PlanError, match="3 stages"):
        plan(FULL, CostModel.uniform(3), Policy())


@given(jobs())
def test_every_plan_verifies_and_keeps_its_bound(job) -> None:
    planned = plan(*job)
    assert planned.bound_us <= planned.period_us
    assert all(len(planned.starts[seat]) == len(program) for seat, program in planned.programs.items())


@given(jobs())
def test_planned_times_respect_dependencies_and_workers(job) -> None:
    view, costs, policy = job
    spans = timeline(plan(view, costs, policy), costs)
    end = {(span.instruction.op, span.instruction.stage, span.instruction.micro_batch): span.end_us for span in spans}
    for one, two in zip(spans, spans[1:]):
        assert one.seat != two.seat or one.end_us <= two.start_us
    for span in spans:
        op, stage, micro_batch = span.instruction.op, span.instruction.stage, span.instruction.micro_batch
        if op is Op.F and stage:
            assert end[Op.F, stage - 1, micro_batch] + costs.communication <= span.start_us
        if op in (Op.I, Op.B) and stage < view.topology.stages - 1:
            assert end[op, stage + 1, micro_batch] + costs.communication <= span.start_us


@given(jobs(), st.randoms(use_true_random=False))
def test_numbering_of_replicas_changes_nothing(job, random) -> None:
    view, costs, policy = job
    names = list(range(view.topology.replicas))
    random.shuffle(names)
    renamed = ClusterView(view.topology, frozenset(Seat(names[seat.replica], seat.stage) for seat in view.live))
    one, two = plan(view, costs, policy), plan(renamed, costs, policy)
    assert (one.period_us, one.span_us, one.bound_us) == (two.period_us, two.span_us, two.bound_us)


def test_digest_does_not_depend_on_the_hash_seed() -> None:
    script = (
        "from recycle_plugin.core.vocabulary.cost import CostModel; from recycle_plugin.core.vocabulary.ids import "
        "Seat\n"
        "from recycle_plugin.core.vocabulary.plan import Policy; from recycle_plugin.core.vocabulary.topology import "
        "Topology\n"
        "from recycle_plugin.planner import plan\n"
        "view = Topology(4, 4, 6).full().without(Seat(1, 2), Seat(0, 1), Seat(3, 2))\n"
        "print(plan(view, CostModel.uniform(4, 9, 11, 10, 2), Policy(activation_cap=5)).digest)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout.strip()) == 16


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_lowering_loads_at_the_ends_and_pairs_every_message(stages: int, micro_batches: int) -> None:
    view = Topology(3, stages, micro_batches).full().without(Seat(2, stages - 1))
    planned = plan(view, CostModel.uniform(stages), Policy())
    programs = {seat: lowered(planned, seat, 7) for seat in planned.programs}
    assert all(one.step == 7 for program in programs.values() for one in program)
    sent = {
        (seat, one.peer, one.op.value[1], one.micro_batch)
        for seat, program in programs.items()
        for one in program
        if one.op in SENDS
    }
    received = {
        (one.peer, seat, one.op.value[1], one.micro_batch)
        for seat, program in programs.items()
        for one in program
        if one.op in RECEIVES
    }
    assert sent == received and len(sent) == 2 * (stages - 1) * 3 * micro_batches
    loads = [(one.stage, one.micro_batch) for program in programs.values() for one in program if one.op is Op.LOAD]
    assert sorted(loads) == sorted((stage, mb) for stage in {0, stages - 1} for mb in view.topology.batch)


def test_a_worker_without_a_micro_batch_still_reduces_and_steps() -> None:
    view = Topology(3, 2, 1).full()
    planned = plan(view, CostModel.uniform(2), replace(Policy(), validate=True))
    for program in planned.programs.values():
        assert [one.op for one in program[-3:]] == [Op.REDUCE, Op.VALIDATE, Op.STEP]
