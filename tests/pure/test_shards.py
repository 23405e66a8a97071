"""Seats of two shards: what they have together, where they stop, and what counts once both have said it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.shards import JOINT, WITH_OTHERS, Lockstep, drawn_by_all, held_by_all
from recycle_plugin.core.coordinator.step_validation import StepValidation
from recycle_plugin.core.coordinator.straggler_detector import STEPS
from recycle_plugin.core.messages.contributions import LOSS, NORM, Contributions
from recycle_plugin.core.messages.protocol import (
    Collected,
    Committed,
    ComputeTime,
    Contribution,
    End,
    Exited,
    Fence,
    Fingerprint,
    Generation,
    Missing,
    Ready,
    Resume,
    Stepped,
    SurvivorReport,
)
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum, pack, provides, requires, unpack
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import RECEIVES, Instruction
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member, WorkerId
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.planner import lowered, plan
from tests.support.membership import job, said

SHAPE = Topology(2, 3, 3)
COSTS = CostModel.uniform(SHAPE.stages)
POLICIES = (Policy(), Policy(split_backward=False), Policy(validate=True), Policy(activation_cap="1f1b"))
PROGRAMS = [lowered(plan(SHAPE.full(), COSTS, policy), seat, 4) for policy in POLICIES for seat in SHAPE.seats]
TIED = [
    lowered(plan(Topology(2, 3, 3, ((0, 2),)).full(), COSTS, Policy(validate=True)), seat, 4) for seat in SHAPE.seats
]

# --- where they stop ------------------------------------------------------------------------------------


class Shards:
    """Two that run ``program`` as fast as ``random`` has it, until they are stopped."""

    def __init__(self, program: tuple[Instruction, ...], random: Random) -> None:
        self.program, self.random = program, random
        self.finished = [0, 0]
        self.entered = [False, False]  # a joint instruction that is not finished

    def run(self, turns: int) -> None:
        for _ in range(turns):
            shard = self.random.randrange(2)
            if self.finished[shard] < len(self.program) and self._may_go_on(shard):
                self.finished[shard], self.entered[shard] = self.finished[shard] + 1, False

    def _may_go_on(self, shard: int) -> bool:
        one, mine, other = self.program[self.finished[shard]], self.finished[shard], self.finished[1 - shard]
        if one.op in JOINT:
            self.entered[shard] = True
            return other > mine or (other == mine and self.entered[1 - shard])
        return one.op not in WITH_OTHERS or self.random.random() < 0.9  # it comes at another time for each


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PROGRAMS + TIED), st.randoms(use_true_random=False), st.integers(0, 200), st.floats(0, 1))
def test_both_stop_at_the_same_instruction_with_the_same_data(program, random, turns, share):
    shards = Shards(program, random)
    shards.run(turns)
    control_view, lockstep = max(shards.finished), Lockstep(program, SHAPE.stages)
    lost = {one for one in program if one.op in WITH_OTHERS and random.random() < share}
    ran = [
        [*program[:finished], *lockstep.catch_up(finished, control_view, lambda one: one not in lost)]
        for finished in shards.finished
    ]
    ahead, behind = sorted(ran, key=len, reverse=True)
    assert ahead == list(program[:control_view]) and set(behind) <= set(ahead)
    left_out = [one for one in ahead if one not in behind]
    assert all(one.op in WITH_OTHERS for one in left_out) and (share or not left_out)
    void = {
        datum for one in left_out for datum in (requires(one, SHAPE.stages) if one.op in RECEIVES else provides(one))
    }
    assert not any(void & set(requires(one, SHAPE.stages, tied=True)) for one in behind if one not in left_out), (
        "nobody has used what is not there"
    )


def test_who_is_behind_finishes_the_joint_instruction_that_it_is_in_and_what_needs_nobody():
    program = tuple(map(Instruction.parse, ("1F0.0@1", "1SA0.0>0.2@1", "1RA1.0<0.0@1", "1W0.0@1", "1F1.0@1")))
    lockstep = Lockstep(program, 3)
    assert lockstep.catch_up(0, 4, lambda one: True) == program[:4]
    assert lockstep.catch_up(0, 4, lambda one: False) == (*program[:2], program[3])
    assert lockstep.catch_up(4, 4, lambda one: False) == ()
    with pytest.raises(
        AssertionError, match="has finished 1F1.0@1, and another has not come to it: it stands before 1W0.0@1"
    ):
        lockstep.catch_up(3, 5, lambda one: True)


def test_a_sum_that_does_not_come_about_takes_what_is_made_of_it_along():
    program = tuple(map(Instruction.parse, ("0W0.0@1", "0REDUCE@1", "0TIE@1", "0VALIDATE@1", "0STEP@1")))
    assert Lockstep(program, 3).catch_up(0, 4, lambda one: str(one) != "0REDUCE@1") == program[:1]
    assert Lockstep(program, 3).catch_up(0, 4, lambda one: str(one) != "0TIE@1") == program[:2]


# --- what they have together ----------------------------------------------------------------------------


def test_a_datum_is_held_only_if_every_shard_holds_it():
    both, one = Datum("act", 1, MicroBatch(0, 0), 3), Datum("reduced", 1, None, 3)
    assert unpack(held_by_all([pack({both, one}), pack({both})])) == {both}
    assert held_by_all([pack({both, one})]) == pack({both, one})
    assert drawn_by_all([{"3": "0.0 0.1", "4": "0.0"}, {"3": "0.1 0.0=0.2"}]) == {"3": "0.1"}
    assert drawn_by_all([{"3": "0.0"}]) == {"3": "0.0"}


def test_contributions_are_complete_when_every_shard_has_said_its_own():
    found = Contributions(shards=2)
    assert found.add(Contribution(0, 1, NORM, {"0": 1.0, "1": 2.0}, 2)) is None
    assert found.add(Contribution(1, 1, NORM, {"1": 8.0}, 2, shard=1)) is None
    assert found.add(Contribution(1, 1, NORM, {"0": 4.0}, 2, shard=1)) == {"0": 5.0, "1": 10.0}
    assert found.add(Contribution(0, 1, LOSS, {"0.0": 3.0}, 1)) is None
    assert found.add(Contribution(1, 1, LOSS, {"0.0": 3.0}, 1, shard=1)) == {"0.0": 3.0}


def test_a_norm_is_that_of_all_shards():
    validation = StepValidation(stages=2, limit=5.0, shards=2)
    assert [validation.add(1, {str(stage): 9.0}, shard) for stage, shard in ((0, 0), (0, 0), (0, 1), (1, 0))] == [
        None
    ] * 4
    assert validation.add(1, {"1": 9.0}, 1) == 6.0


# --- a job of 2 replicas x 2 stages x 2 shards --------------------------------------------------------------


def sharded(rank: int) -> Member:
    place, shard = divmod(rank, 2)
    return Member(rank, Seat(place % 2, place // 2), f"tcp://a:{rank}", "h", 0, shard)


def begun() -> Membership:
    membership = Membership(8)
    for rank in range(8):
        membership.receive(Ready(sharded(rank), 0, job()), 0.0)
    report(membership, 0, range(8))
    return membership


def report(membership: Membership, generation: int, ranks, held=lambda rank: {}, stepped: int = 0) -> list:
    return [
        one
        for rank in ranks
        for _, one in membership.receive(SurvivorReport(rank, generation, stepped, "plan", held(rank)), 0.0).messages
    ]


def committed(membership: Membership, number: int, ranks) -> list[int]:
    """Of which ranks' words a step was committed."""
    return [
        rank for rank in ranks if said(membership.receive(Stepped(rank, membership.generation, number), 0.0), Committed)
    ]


def test_a_step_is_committed_when_all_shards_of_all_seats_have_applied_it():
    assert committed(begun(), 1, (0, 2, 4, 6, 7, 5, 3, 1)) == [1]


def test_a_lost_shard_takes_its_seat_and_what_the_seats_hold_is_what_all_their_shards_do():
    membership = begun()
    out = membership.receive(Exited(4, -9, 0.0), 0.0)
    (generation,) = said(out, Generation)
    assert [one.rank for one in generation.members] == [0, 1, 2, 3, 6, 7] and {
        one.rank for one in said(out, Fence)
    } == {5}
    mine = Datum("wgrad", 0, MicroBatch(0, 0), 1)
    (resume,) = [
        one
        for one in report(membership, 1, (0, 1, 2, 3, 6, 7), lambda rank: pack({mine}) if rank in (0, 1, 2) else {})
        if isinstance(one, Resume)
    ]
    assert {seat: set(unpack(held)) for seat, held in resume.held.items()} == {
        "0.0": {mine},
        "1.0": set(),
        "1.1": set(),
    }
    assert committed(membership, 1, (0, 1, 2, 3, 6, 7)) == [7]


def test_a_tensor_is_missed_from_the_same_shard_of_the_other_seat():
    membership = begun()
    for generation in range(2):
        membership.receive(Missing(1, generation, "x", "0.1"), 0.0)
        report(membership, generation + 1, range(8))
    out = membership.receive(Missing(1, 2, "x", "0.1"), 0.0)
    assert membership.lost == {WorkerId(5), WorkerId(4)} and said(out, Fence)[0].worker == WorkerId(5)


def test_shards_are_compared_with_the_same_shard_of_other_seats():
    membership = begun()
    for rank in range(8):
        membership.receive(Fingerprint(rank, 1, f"shard {rank % 2}"), 0.0)
        membership.receive(Stepped(rank, 0, 1), 0.0)
    assert membership.committed == 1 and not membership.lost and membership.ended is None
    for rank in range(8):
        membership.receive(Fingerprint(rank, 2, "bad" if rank == 3 else f"shard {rank % 2}"), 0.0)
        out = membership.receive(Stepped(rank, 0, 2), 0.0)
    (end,) = said(out, End)
    assert (
        "the replicas at seat 0.0 (rank 1), seat 1.0 (rank 3) differ after step 2, and no majority says which is right"
        in end.reason
    )


def test_a_seat_is_as_slow_as_its_slowest_shard():
    membership = begun()
    for number in range(1, STEPS + 1):
        for rank in range(8):
            membership.receive(ComputeTime(rank, number, 200 if rank == 3 else 100, 100), 0.0)
            out = membership.receive(Stepped(rank, 0, number), 0.0)
    (generation,) = said(out, Generation)
    assert generation.slowness == ((Seat(1, 0), 200),)


def test_all_shards_say_what_becomes_of_a_loss():
    membership = begun()
    told = [
        one
        for rank in (4, 5, 6, 7)
        for _, one in membership.receive(
            Contribution(rank, 1, LOSS, {f"{rank // 2 - 2}.0": 1.0}, 2, shard=rank % 2), 0.0
        ).messages
    ]
    assert told == [Collected(1, LOSS, {"0.0": 1.0, "1.0": 1.0})]
