"""Unequal workers and links, mixed backwards; packed programs; the compiled verifier against a slow one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum, provides, requires
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction, Op
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.program import Packed, Programs, Route, decode, encode
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology
from recycle_plugin.planner import PlanError, VerificationError, plan, verify
from recycle_plugin.planner.assemble import timeline
from recycle_plugin.planner.reroute import shares
from tests.support.planned import EXAMPLE, LOST, UNIT, jobs, wide_jobs

# The verifier's rules once more, slow and without arrays: what the compiled one is compared with.
ORDERS = ([Op.F, Op.I, Op.W], [Op.F, Op.B])


def acceptable(plan: Plan) -> bool:
    return all(rule(plan) for rule in (_ends, _once, _blocks, _memory, _progress))


def _ends(plan: Plan) -> bool:
    for seat, program in plan.programs.items():
        tied, validated = (
            bool(plan.view.topology.tie(seat.stage)),
            plan.policy.validate or not plan.policy.stagger_optimizer,
        )
        tail = (Op.REDUCE, *[Op.TIE] * tied, *[Op.VALIDATE] * validated, Op.STEP)
        ops = tuple(one.op for one in program)
        if (
            ops[-len(tail) :] != tail
            or not set(ops[: -len(tail)]) <= COMPUTE
            or any(one.stage != seat.stage for one in program)
        ):
            return False
    return True


def _once(plan: Plan) -> bool:
    ran = defaultdict(list)
    for seat, program in plan.programs.items():
        for one in program:
            if one.op in COMPUTE:
                if plan.route.get((one.stage, one.micro_batch)) != seat:
                    return False
                ran[one.stage, one.micro_batch].append(one.op)
    return all(ran[stage, mb] in ORDERS for stage in range(plan.stages) for mb in plan.view.topology.batch)


def _blocks(plan: Plan) -> bool:
    workers, last, size = {}, {}, plan.policy.block or plan.view.topology.micro_batches
    for seat, program in plan.programs.items():
        for one in program:
            if one.op in COMPUTE:
                block = one.stage, one.micro_batch.replica, one.micro_batch.index // size
                if workers.setdefault(block, seat) != seat:
                    return False
                if one.op in (Op.W, Op.B) and last.setdefault(block, -1) > one.micro_batch.index:
                    return False
                last[block] = one.micro_batch.index if one.op in (Op.W, Op.B) else last.get(block, -1)
    return True


def _memory(plan: Plan) -> bool:
    for seat, program in plan.programs.items():
        held = 0
        for one in program:
            held += {Op.F: 1, Op.W: -1, Op.B: -1}.get(one.op, 0)
            if held > plan.policy.cap(seat.stage, plan.stages):
                return False
    return True


def _progress(plan: Plan) -> bool:
    """Try everybody's next instruction until nobody can go on."""
    made = {Datum("params", stage, None, 0) for stage in range(plan.stages)}
    made |= {Datum("data", stage, mb, 0) for stage in (0, plan.stages - 1) for mb in plan.view.topology.batch}
    place, arrived, moved = dict.fromkeys(plan.programs, 0), defaultdict(list), True
    while moved:
        moved = False
        for seat, program in plan.programs.items():
            if place[seat] == len(program):
                continue
            one = program[place[seat]]
            own = plan.own(seat) if one.op is Op.REDUCE else ()
            tie = plan.view.topology.tie(seat.stage)
            if all(datum in made for datum in requires(one, plan.stages, own, bool(tie))):
                place[seat] += 1
                moved = True
                arrived[one.op].append(seat)
                if one.op is Op.TIE:
                    if {other for other in plan.view.live if other.stage in tie} <= set(arrived[one.op]):
                        made.update(Datum("tied", stage, None, 0) for stage in tie)
                elif one.op is not Op.REDUCE or {other for other in plan.view.live if other.stage == seat.stage} <= set(
                    arrived[one.op]
                ):
                    made.update(provides(one))
    return all(place[seat] == len(program) for seat, program in plan.programs.items())


@given(wide_jobs())
@settings(max_examples=150)
def test_plans_of_unequal_jobs_keep_bound_memory_and_dependencies(job) -> None:
    view, costs, policy = job
    planned = plan(view, costs, policy)
    assert planned.bound_us <= planned.period_us
    assert planned.gap == planned.period_us / planned.bound_us - 1
    spans = timeline(planned, costs)
    ran = {
        (
            span.instruction.op if span.instruction.op is not Op.B else Op.I,
            span.instruction.stage,
            span.instruction.micro_batch,
        ): span
        for span in spans
    }
    for one, two in zip(spans, spans[1:]):
        assert one.seat != two.seat or one.end_us <= two.start_us
    for (op, stage, micro_batch), span in ran.items():
        maker = {Op.F: (Op.F, stage - 1), Op.I: (Op.I, stage + 1)}.get(op)
        if maker and 0 <= maker[1] < planned.stages:
            source = ran[(*maker, micro_batch)]
            assert source.end_us + costs.transfer(source.seat, span.seat) <= span.start_us
    _check_memory(planned)


def _check_memory(planned) -> None:
    for seat, program in planned.programs.items():
        held = 0
        for one in program:
            held += {Op.F: 1, Op.W: -1, Op.B: -1}.get(one.op, 0)
            assert held <= planned.policy.cap(seat.stage, planned.stages)
        assert held == 0


@given(wide_jobs(), st.randoms(use_true_random=False))
def test_numbering_of_replicas_changes_nothing_where_workers_differ(job, random) -> None:
    view, costs, policy = job
    names = list(range(view.topology.replicas))
    random.shuffle(names)

    def renamed(seat: Seat) -> Seat:
        return Seat(names[seat.replica], seat.stage)

    other = ClusterView(view.topology, frozenset(map(renamed, view.live)))
    model = replace(costs, slowness=tuple((renamed(seat), percent) for seat, percent in costs.slowness))
    one, two = plan(view, costs, policy), plan(other, model, policy)
    assert (one.period_us, one.span_us, one.bound_us) == (two.period_us, two.span_us, two.bound_us)


@given(jobs(), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_the_compiled_verifier_agrees_with_the_slow_one(job, random) -> None:
    """On plans with one random change: an instruction moved, dropped, doubled or replaced."""
    good = plan(*job)
    assert acceptable(good)
    seat = random.choice(good.programs.seats)
    program = list(good.programs[seat])
    place, other = random.randrange(len(program)), random.randrange(len(program))
    match random.randrange(4):
        case 0:
            program.insert(other, program.pop(place))
        case 1:
            del program[place]
        case 2:
            program.insert(other, program[place])
        case 3 if program[place].micro_batch:
            program[place] = replace(program[place], micro_batch=random.choice(good.view.topology.batch))
    changed = replace(good, programs={**good.programs, seat: tuple(program)})
    try:
        verify(changed)
        accepted = True
    except VerificationError:
        accepted = False
    assert accepted == acceptable(changed)


def test_a_straggler_keeps_fewer_micro_batches() -> None:
    costs = replace(CostModel.uniform(3, 10, 10, 10), slowness=((Seat(1, 1), 150),))
    planned = plan(Topology(3, 3, 8).full(), costs, Policy(activation_cap=6))
    assert [len(planned.own(Seat(replica, 1))) for replica in range(3)] == [9, 6, 9]
    without = plan(Topology(3, 3, 8).full(), costs, Policy(activation_cap=6, reroute=False))
    assert planned.period_us < without.period_us == 8 * 45


@given(st.integers(0, 40), st.lists(st.integers(10, 500), min_size=1, max_size=5))
def test_shares_end_as_early_as_any(total: int, percents: list[int]) -> None:
    taken = shares(total, percents)
    assert sum(taken) == total
    latest = max((count * percent for count, percent in zip(taken, percents)), default=0)
    assert sum((latest - 1) // percent for percent in percents) < total or latest == 0


def test_caps_per_stage_and_1f1b() -> None:
    view = EXAMPLE.full().without(LOST)
    tight, same = (plan(view, UNIT, Policy(activation_cap=cap)) for cap in ("1f1b", (4, 3, 2, 1)))
    assert dict(tight.programs) == dict(same.programs)
    with pytest.raises(PlanError, match="3 entries for 4 stages"):
        plan(view, UNIT, Policy(activation_cap=(1, 2, 3)))
    with pytest.raises(ValueError, match="1f1b"):
        Policy(activation_cap="2f2b")


@given(jobs())
@settings(max_examples=20)
def test_packed_programs_are_the_programs(job) -> None:
    planned = plan(*job)
    tuples = {seat: tuple(program) for seat, program in planned.programs.items()}
    again = replace(planned, programs=tuples, route=dict(planned.route))
    assert again == planned and again.digest == planned.digest and again.programs.data == planned.programs.data
    assert all(decode(encode(one)) == one for program in tuples.values() for one in program)
    owned = [(seat, mb) for seat in planned.programs for mb in planned.own(seat)]
    assert sorted(owned) == sorted((seat, mb) for (_, mb), seat in planned.route.items())
    assert len(owned) == len(planned.route)


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(ValueError, match="templates"):
        encode(Instruction(Op.F, 0, MicroBatch(0, 0), step=3))
    with pytest.raises(ValueError, match="1 seats"):
        Packed((Seat(0, 0),), (2,), b"12345678")
    with pytest.raises(ValueError, match="a route of"):
        Route(EXAMPLE, b"")
    assert list(Programs.of({Seat(0, 0): (Instruction(Op.STEP, 0),)})[Seat(0, 0)]) == [Instruction(Op.STEP, 0)]
