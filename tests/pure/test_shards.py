"""Seats of two shards: what they have together, where they stop, and what counts once both have said it."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_plugin.core.coordinator.facts.shards import drawn_by_all, held_by_all
from recycle_plugin.core.coordinator.facts.slowness import SEAT_STEPS
from recycle_plugin.core.coordinator.facts.step_validation import StepValidation
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.messages.contributions import LOSS, MEAN, NORM, Contributions
from recycle_plugin.core.messages.from_coordinator import Collected, Committed, End, Fence, Generation, Resume
from recycle_plugin.core.messages.from_workers import (
    Contribution,
    Exited,
    Fingerprint,
    Missing,
    Ready,
    Stepped,
    SurvivorReport,
)
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum, provides, requires
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import RECEIVES, Instruction
from recycle_plugin.core.vocabulary.packed_data import PackedData, of_each, pack
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member, WorkerId
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.core.worker.lockstep import JOINT, LEFT_OUT, SUMS, Lockstep, Word
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


class Line:
    """One shard's means to wait and to talk; what it says is heard when the test delivers it."""

    def __init__(self) -> None:
        self.control_view = ControlView(0)
        self.said: deque[Word] = deque()
        self.heard = Word()

    def wait(self, what, ready, interruptible=True):
        while True:
            if interruptible:
                self.control_view.check()
            if (value := ready()) is not None:
                return value
            yield Activity.of(WAITS, what).what

    def say_in_seat(self, word: Word) -> None:
        self.said.append(word)

    def heard_in_seat(self, shard: int) -> Word:
        return self.heard


class Shard:
    """One that runs ``program`` until it is stopped.  ``comes(instruction)``: whether what that waits for is here, None
    where it is not yet.
    """

    def __init__(self, number: int, program: tuple[Instruction, ...], comes) -> None:
        self.line, self.ran, self.left_out, self._comes = Line(), [], [], comes
        self.lockstep = Lockstep(self.line, Seat(0, 0), number, 2)
        self.life, self.ended = self._run(program), ""

    def _run(self, program):
        assert (yield from self.lockstep.take_up(0))
        for one in program:
            yield from self.lockstep.come_to()
            if (yield from self._awaits(one)):
                if one.op in JOINT and not self.lockstep.stops:
                    yield from self.lockstep.begin(str(one))
                if one.op in SUMS:
                    yield from self.lockstep.begin_sum(one)
                self.ran.append(one)
            else:
                self.left_out.append(one)
            self.lockstep.finished += 1

    def _awaits(self, one: Instruction):
        if one.op not in LEFT_OUT | SUMS:
            return True
        if self.lockstep.stops:
            return bool(self._comes(one))
        try:
            return (yield from self.line.wait(str(one), lambda: self._comes(one)))
        except Interrupted:
            yield from self.lockstep.stop()
            return False

    def turn(self) -> None:
        if not self.ended:
            try:
                next(self.life)
            except StopIteration:
                self.ended = "through"
            except Interrupted:
                self.ended = "stopped"


def play(program: tuple[Instruction, ...], random: Random, turns: int, share: float) -> list[Shard]:
    """Two shards run ``program``, as fast as ``random`` has it.  After so many turns each hears that the membership has
    changed, at another time; what waits for others may not come then, where they are among a ``share``.
    """
    lost = {one for one in program if one.op in LEFT_OUT | SUMS and random.random() < share}
    shards: list[Shard] = []

    def comes(number: int):
        return lambda one: None if (one in lost and turn > turns / 2) or random.random() < 0.2 else True

    shards = [Shard(number, program, comes(number)) for number in range(2)]
    for turn in range(turns + 20 * len(program)):
        if turn >= turns and random.random() < 0.1:
            view = random.choice(shards).line.control_view
            view.take(Generation(1, (sharded(0), sharded(1)), 0, "a loss", 0.0))
        one, other = random.sample(shards, 2)
        if one.line.said and random.random() < 0.7:
            other.line.heard = one.line.said.popleft()
        one.turn()
        if all(shard.ended for shard in shards):
            break
    return shards


@settings(max_examples=300)
@given(st.sampled_from(PROGRAMS + TIED), st.integers(0, 2**32), st.integers(0, 400), st.floats(0, 1))
def test_both_stop_at_the_same_instruction_with_the_same_data(program, seed, turns, share):
    shards = play(program, Random(seed), turns, share)
    assert [shard.ended for shard in shards] in (["through"] * 2, ["stopped"] * 2), "nobody waits for the other"
    behind, ahead = sorted(shards, key=lambda shard: len(shard.ran))
    assert [*program[: behind.lockstep.finished]] == sorted([*behind.ran, *behind.left_out], key=program.index)
    assert behind.lockstep.finished == ahead.lockstep.finished
    for shard in shards:
        assert all(one.op in LEFT_OUT for one in shard.left_out) and len(set(shard.ran)) == len(shard.ran)
    only = set(behind.ran) ^ set(ahead.ran)
    void = {datum for one in only for datum in (requires(one, SHAPE.stages) if one.op in RECEIVES else provides(one))}
    used = {
        datum
        for shard in shards
        for one in shard.ran
        for datum in requires(one, SHAPE.stages, tied=True)
        if one not in only
    }
    assert not void & used, "nobody has used what the other has not"


def test_who_is_behind_runs_what_needs_nobody_and_leaves_out_what_does_not_come():
    program = tuple(map(Instruction.parse, ("1W0.0@1", "1SA0.0>0.2@1", "1RA1.0<0.0@1", "1W1.0@1", "1F1.0@1")))
    ahead, behind = Shard(0, program, lambda one: True), Shard(1, program, lambda one: None)
    for _ in range(9):
        for one, other in ((ahead, behind), (behind, ahead)):
            one.turn()
            while one.line.said:
                other.line.heard = one.line.said.popleft()
    assert ahead.ran == [*program[:4]] and behind.ran == [*program[:2]]
    for shard in (ahead, behind):
        shard.line.control_view.take(Generation(1, (sharded(0), sharded(1)), 0, "a loss", 0.0))
    for _ in range(9):
        for one, other in ((ahead, behind), (behind, ahead)):
            one.turn()
            while one.line.said:
                other.line.heard = one.line.said.popleft()
    assert (ahead.ended, behind.ended) == ("stopped", "stopped")
    assert behind.ran == [*program[:2], program[3]] and behind.left_out == [program[2]]


def test_shards_that_are_at_different_things_say_so():
    one, other = (Lockstep(Line(), Seat(0, 0), number, 2) for number in range(2))
    next(one.begin("1F0.0@1"))
    other._port.heard = one._port.said[-1]
    with pytest.raises(AssertionError, match="the shards of seat 0.0 are apart: one is at 1W0.0@1, another at 1F0.0@1"):
        next(other.begin("1W0.0@1"))


def test_a_generation_is_taken_up_by_all_or_by_none():
    lines = [Line(), Line()]
    one, other = (Lockstep(line, Seat(0, 0), number, 2) for number, line in enumerate(lines))
    takes = one.take_up(3)
    next(takes)
    other.say_stopped(4)
    lines[0].heard = lines[1].said[-1]
    with pytest.raises(StopIteration) as ended:
        next(takes)
    assert ended.value.value is False
    takes = one.take_up(4)
    next(takes)
    lines[1].heard = lines[0].said[-1]
    with pytest.raises(StopIteration) as ended:
        next(other.take_up(4))
    assert ended.value.value is True
    other.say_stopped(5)  # it hears of yet another one at once, and has said before that it takes this one up
    assert [word.generation for word in lines[1].said] == [-1, 4, 4]
    lines[0].heard = lines[1].said[-1]
    with pytest.raises(StopIteration) as ended:
        next(takes)
    assert ended.value.value is True


# --- what they have together ----------------------------------------------------------------------------


def test_a_datum_is_held_only_if_every_shard_holds_it():
    both, one = Datum("act", 1, MicroBatch(0, 0), 3), Datum("reduced", 1, None, 3)
    assert PackedData(held_by_all([pack({both, one}), pack({both})])) == {both}
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
    return [
        rank for rank in ranks if said(membership.receive(Stepped(rank, membership.generation, number), 0.0), Committed)
    ]


def test_a_step_is_committed_when_all_shards_of_all_seats_have_applied_it():
    assert committed(begun(), 1, (0, 2, 4, 6, 7, 5, 3, 1)) == [1]


def test_a_lost_shard_takes_its_seat_and_what_the_seats_hold_is_what_all_their_shards_do():
    membership = begun()
    out = membership.receive(Exited(4, -9, 0.0), 0.0)
    (generation,) = said(out, Generation)
    assert [one.rank for one in generation.members] == [0, 1, 2, 3, 6, 7]
    assert {one.rank for one in said(out, Fence)} == {5}
    mine = Datum("wgrad", 0, MicroBatch(0, 0), 1)
    (resume,) = [
        one
        for one in report(membership, 1, (0, 1, 2, 3, 6, 7), lambda rank: pack({mine}) if rank in (0, 1, 2) else {})
        if isinstance(one, Resume)
    ]
    assert {str(seat): held for seat, held in of_each(resume.held).items()} == {
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
    for number in range(1, SEAT_STEPS + 1):
        for rank in range(8):
            time = ComputeTime(200 if rank == 3 else 100, 100)
            out = membership.receive(Stepped(rank, 0, number, time=time), 0.0)
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
    assert told == [Collected(1, LOSS, {MEAN: 1.0})]
