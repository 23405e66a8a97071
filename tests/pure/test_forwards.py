"""Evaluations as programs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin import planner
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.evaluation_route import readers
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.planner.forwards import forwards


@st.composite
def degraded(draw):
    """A view with at least one worker in each stage."""
    shape = Topology(draw(st.integers(2, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    kept = {Seat(draw(st.integers(0, shape.replicas - 1)), stage) for stage in range(shape.stages)}
    return shape.full().without(*draw(st.sets(st.sampled_from([seat for seat in shape.seats if seat not in kept]))))


@given(degraded(), st.integers(1, 5))
def test_every_batch_that_can_be_read_goes_through_all_stages_once(view, count):
    shape = view.topology
    plan = planner.plan(view, CostModel.uniform(shape.stages, 1, 1, 1), Policy())
    programs = {seat: list(forwards(plan, seat, -1, count)) for seat in view.live}
    run = sorted((one.stage, one.micro_batch) for program in programs.values() for one in program if one.op is Op.F)
    batch = [MicroBatch(replica, index) for replica in readers(view) for index in range(count)]
    assert run == sorted((stage, one) for stage in range(shape.stages) for one in batch)
    loads = [one for program in programs.values() for one in program if one.op is Op.LOAD]
    assert len(loads) == len(batch) * len({0, shape.stages - 1})


@given(degraded(), st.integers(1, 5))
def test_they_run_to_the_end_with_every_send_received_where_it_goes(view, count):
    plan = planner.plan(view, CostModel.uniform(view.topology.stages, 1, 1, 1), Policy())
    left = {seat: list(forwards(plan, seat, -1, count)) for seat in view.live}
    sent: set[tuple[Seat, Instruction]] = set()
    while any(left.values()):
        ready = [
            seat
            for seat, program in left.items()
            if program and (program[0].op is not Op.RECV_ACT or (seat, program[0]) in sent)
        ]
        assert ready, left
        for seat in ready:
            one = left[seat].pop(0)
            if one.op is Op.SEND_ACT:
                sent.add((one.peer, Instruction(Op.RECV_ACT, one.stage + 1, one.micro_batch, one.step, seat)))
            if one.op is Op.RECV_ACT:
                sent.remove((seat, one))
    assert not sent


@given(degraded())
def test_a_replica_is_read_by_its_live_ends(view):
    found = readers(view)
    for replica in range(view.topology.replicas):
        ends = [Seat(replica, 0), Seat(replica, view.topology.stages - 1)]
        live = [seat for seat in ends if seat in view.live]
        assert (replica in found) == bool(live)
        for end, reader in zip(ends, found.get(replica, ())):
            assert reader in live and (reader == end or end not in view.live)


def test_an_evaluations_instruction_has_a_text_form():
    one = Instruction(Op.F, 1, MicroBatch(0, 2), -3)
    assert str(one) == "1F0.2@-3" and Instruction.parse(str(one)) == one
