"""Several workers that hold one seat: they are lost together, started again together, and come back together."""

from __future__ import annotations

import json
from collections.abc import Collection

import pytest

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.messages.from_coordinator import Fence, Generation, HashAfter, Resume, Serve
from recycle_plugin.core.messages.from_workers import (
    CatchUp,
    CaughtUp,
    Exited,
    Leaving,
    Left,
    Ready,
    StateHash,
    Stepped,
    SurvivorReport,
)
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member, WorkerId
from tests.support.membership import job, orders, said, step

SEAT, HALVES, STAYING = Seat(0, 1), (4, 5), (0, 1, 2, 3, 6, 7)
BACK = [WorkerId(rank, 1) for rank in HALVES]


def holding(rank: int, incarnation: int = 0) -> Member:
    place, shard = divmod(rank, 2)
    return Member(rank, Seat(place % 2, place // 2), f"tcp://a:{rank}.{incarnation}", "h", incarnation, shard)


def begun() -> Membership:
    membership = Membership(8)
    for rank in range(8):
        membership.identify(WorkerId(rank))
        membership.receive(Ready(holding(rank), 0, job(rejoin="always")), 0.0)
    report(membership, 0, 0, [WorkerId(rank) for rank in range(8)])
    return membership


def report(membership: Membership, generation: int, stepped: int, workers: Collection[WorkerId]) -> CoordinatorOutput:
    for rank, incarnation in workers:
        out = membership.receive(SurvivorReport(rank, generation, stepped, "plan", {}, incarnation=incarnation), 0.0)
    return out


def applied(membership: Membership, generation: int, number: int) -> None:
    for rank in STAYING:
        membership.receive(Stepped(rank, generation, number), 0.0)


def dies(membership: Membership, worker: WorkerId) -> CoordinatorOutput:
    return membership.receive(Exited(worker.rank, -9, 0.0, incarnation=worker.incarnation), 0.0)


def fenced(out: CoordinatorOutput) -> set[WorkerId]:
    return {one.worker for one in said(out, Fence)}


def lost() -> Membership:
    """The seat is lost, and both its processes are dead."""
    membership = begun()
    dies(membership, WorkerId(4))
    dies(membership, WorkerId(5))
    report(membership, 1, 0, [WorkerId(rank) for rank in STAYING])
    return membership


def come(membership: Membership, workers: Collection[WorkerId]) -> None:
    for worker in workers:
        assert membership.identify(worker) == worker
        assert membership.greet(worker, "h") == CoordinatorOutput()
        membership.receive(Ready(holding(*worker), 0, job(rejoin="always")), 0.0)


def following() -> Membership:
    """The next two follow, and the first has said that it has caught up."""
    membership = lost()
    come(membership, BACK)
    for worker, sources in zip(BACK, ({6}, {7})):
        out = membership.receive(CatchUp(worker.rank, incarnation=1), 0.0)
        assert {whom.rank for whom, one in out.messages if isinstance(one, Serve)} == sources, "of the same shard"
    for number in (1, 2):
        applied(membership, 1, number)
    out = membership.receive(CaughtUp(4, 2, 9, 0, incarnation=1), 0.0)
    assert not said(out, Generation), "half a seat is not let in"
    return membership


def announced() -> Membership:
    """Both are announced, and the others have come to the step from which they are to enter."""
    membership = following()
    out = membership.receive(CaughtUp(5, 2, 9, 0, incarnation=1), 0.0)
    assert {(whom.rank, one.step) for whom, one in out.messages if isinstance(one, HashAfter)} == {(5, 3), (7, 3)}
    (generation,) = said(out, Generation)
    assert generation.from_step == 5 and SEAT in generation.roster.working
    for number in (3, 4):
        applied(membership, 1, number)
    return membership


def compared() -> Membership:
    """Both are announced, and have their stage's state."""
    membership = announced()
    for rank, incarnation in ((6, 0), (4, 1), (7, 0), (5, 1)):
        membership.receive(StateHash(rank, 3, f"of shard {rank % 2}", incarnation=incarnation), 0.0)
    assert membership.ended is None and not membership.state.joining.comparisons
    return membership


def test_the_processes_of_a_lost_seat_are_started_again_once_all_of_them_are_dead():
    membership = begun()
    out = dies(membership, WorkerId(4))
    assert fenced(out) == {WorkerId(5)} and orders(out) == []
    assert orders(dies(membership, WorkerId(5))) == [(4, 1, 1.0), (5, 1, 1.0)]


@pytest.mark.parametrize("dead", BACK)
def test_where_one_of_two_newcomers_dies_the_other_is_ended_and_they_count_as_one(dead):
    membership = following()
    (other,) = {*BACK} - {dead}
    out = dies(membership, dead)
    assert fenced(out) == {other} and orders(out) == [] and not membership.state.joining
    assert orders(dies(membership, other)) == [(4, 2, 2.0), (5, 2, 2.0)], "as after one in vain, and not two"
    assert len(membership.roster) == 6 and membership.ended is None


def test_one_that_has_not_come_yet_is_not_waited_for():
    """It may never be started, and then nobody says that it has ended."""
    membership = lost()
    come(membership, BACK[:1])
    out = dies(membership, BACK[0])
    assert fenced(out) == {BACK[1]} and orders(out) == [(4, 2, 2.0), (5, 2, 2.0)]
    assert dies(membership, BACK[1]) == CoordinatorOutput(), "old news"


def test_they_enter_together_where_both_are_equal():
    membership = compared()
    report(membership, 2, 4, [*map(WorkerId, STAYING), BACK[0]])
    assert membership.is_outside(BACK[0]), "as long as the other has not reported"
    out = report(membership, 2, 4, BACK[1:])
    assert not membership.is_outside(BACK[0]) and {*BACK} <= membership.roster.workers
    assert [event.details["rank"] for event in out.events if event.kind == "rejoined"] == [4, 5]
    assert not membership.state.joining


def test_who_has_the_state_of_another_shard_is_found_and_goes_with_its_seat():
    membership = announced()
    for rank, incarnation in ((6, 0), (7, 0), (4, 1)):
        membership.receive(StateHash(rank, 3, f"of shard {rank % 2}", incarnation=incarnation), 0.0)
    out = membership.receive(StateHash(5, 3, "of shard 0", incarnation=1), 0.0)
    assert fenced(out) == {BACK[1]} and membership.ended is None and membership.roster.ranks == {*STAYING}
    assert fenced(dies(membership, BACK[1])) == {BACK[0]}


def test_where_the_comparison_is_late_the_others_go_on_and_the_next_announcement_waits_for_it():
    membership = announced()
    (generation,) = said(report(membership, 2, 4, [*map(WorkerId, STAYING)]), Generation)
    assert not generation.from_step and generation.roster.ranks == {*STAYING}
    assert not said(report(membership, 3, 4, [WorkerId(rank) for rank in STAYING]), Generation)
    for rank, incarnation in ((6, 0), (7, 0), (4, 1)):
        membership.receive(StateHash(rank, 3, f"of shard {rank % 2}", incarnation=incarnation), 0.0)
    (again,) = said(membership.receive(StateHash(5, 3, "of shard 1", incarnation=1), 0.0), Generation)
    assert again.from_step and [one.worker for one in again.roster.group(SEAT)] == BACK


def test_a_loss_calls_both_off_and_they_are_announced_again():
    membership = compared()
    report(membership, 2, 4, BACK[:1])
    out = dies(membership, WorkerId(2))
    (generation,) = said(out, Generation)
    assert not generation.from_step and generation.roster.ranks == {0, 1, 6, 7}
    dies(membership, WorkerId(3))
    out = report(membership, 3, 4, [WorkerId(rank) for rank in (0, 1, 6, 7)])
    (again,) = said(out, Generation)
    assert said(out, Resume) and [one.worker for one in again.roster.group(SEAT)] == BACK


def test_one_that_has_reported_goes_with_the_other_before_that_is_in_force():
    membership = compared()
    report(membership, 2, 4, BACK)
    out = dies(membership, BACK[0])
    (generation,) = said(out, Generation)
    assert BACK[1] in fenced(out) and generation.roster.ranks == {*STAYING}
    assert orders(dies(membership, BACK[1])) == [(4, 2, 2.0), (5, 2, 2.0)]
    assert said(report(membership, 3, 4, [WorkerId(rank) for rank in STAYING]), Resume)


def test_who_asks_for_the_state_again_takes_the_other_out_of_the_generation_to_come():
    membership = following()
    membership.receive(CaughtUp(5, 2, 9, 0, incarnation=1), 0.0)
    (generation,) = said(membership.receive(CatchUp(5, incarnation=1), 0.0), Generation)
    assert generation.roster.ranks == {*STAYING}
    for rank in (6, 7):
        membership.receive(StateHash(rank, unstarted(2), f"of shard {rank % 2}"), 0.0)
    (generation,) = said(membership.receive(CaughtUp(5, 2, 9, 0, incarnation=1), 0.0), Generation)
    assert [one.worker for one in generation.roster.group(SEAT)] == BACK


def test_who_leaves_takes_the_others_of_its_seat_along():
    membership = begun()
    (generation,) = said(membership.receive(Leaving(4, "SIGTERM"), 0.0), Generation)
    assert generation.from_step and generation.roster.ranks == {*STAYING}
    for number in (1, 2):
        step(membership, 0, number, range(8))
    report(membership, 1, 2, [WorkerId(rank) for rank in STAYING])
    for rank in HALVES:
        membership.receive(Left(rank, planned=True), 0.0)
        assert orders(membership.receive(Exited(rank, 0, 0.0), 0.0)) == []
    assert membership.empty == {*HALVES} and membership.ended is None


def test_a_joiner_takes_one_place_and_the_others_supervisor_starts_its_own_again():
    membership = begun()
    dies(membership, WorkerId(4))
    dies(membership, WorkerId(5))
    membership.supervisor(4, False, 0.0)
    out = membership.join(1, "x", True, 0.5)
    assert orders(out) == [(4, 2, 0.0)], "the other one is on its way"


def test_all_of_it_survives_being_written_down():
    membership = announced()
    again = load(json.loads(json.dumps(dump(membership), allow_nan=False)))
    for worker in BACK:
        assert dies(again, worker) == dies(membership, worker) and dump(again) == dump(membership)
