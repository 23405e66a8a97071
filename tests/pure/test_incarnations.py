"""A later process of a rank is another worker, and who is given up with whom is a policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle_plugin.core.coordinator.facts.output import SupervisorOf
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import End, Fence, Generation
from recycle_plugin.core.messages.from_workers import (
    Contribution,
    Exited,
    Fatal,
    Heartbeat,
    Left,
    Missing,
    Ready,
    Stepped,
    SupervisorHeartbeat,
)
from recycle_plugin.core.vocabulary.roster import WorkerId
from tests.support.membership import agree, job, member, said, started, step

LATE = WorkerId(2, 1)


def ready_again(membership: Membership) -> tuple[list, list]:
    out = membership.receive(Ready(replace(member(2), incarnation=1), 0, job()), 0.0)
    return out.events, out.messages


@pytest.mark.parametrize("lost", [False, True])
def test_who_comes_late_hears_at_once_that_it_cannot_take_part_and_why(lost):
    membership = started()
    step(membership, 0, 1)
    if lost:
        membership.receive(Exited(2, -9, 0.0), 0.0)
    (event,), ((whom, end),) = ready_again(membership)
    assert event.kind == "late" and event.details == {"rank": 2, "host": "h", "incarnation": 1}
    assert "wants to be rank 2, but the job has started, and is at step 2; it is told to end" in event.text
    assert whom == LATE
    assert end == End(
        0,
        "the job has started, and is at step 2; to take a lost worker's seat, start with --join",
        failed=True,
    )
    assert membership.ended is None and len(membership.roster) == 4 - lost


def test_of_two_processes_with_one_rank_the_first_one_takes_part():
    membership = Membership(4)
    membership.receive(Ready(member(2), 0, job()), 0.0)
    (event,), ((whom, end),) = ready_again(membership)
    assert whom == LATE and "another process has rank 2 already" in event.text and end.failed
    assert not membership.connection_lost(LATE, 0.0).messages
    for rank in (0, 1, 3):
        out = membership.receive(Ready(member(rank), 0, job()), 0.0)
    assert membership.started
    assert [one.worker for one in said(out, Generation)[0].members] == [WorkerId(rank) for rank in range(4)]


def test_who_comes_late_hears_so_when_it_connects_and_only_once():
    membership = Membership(4)
    assert not membership.greet(WorkerId(2), "h").messages
    out = membership.greet(LATE, "h")
    assert [(whom, type(end)) for whom, end in out.messages] == [(LATE, End)] and out.events[0].details["rank"] == 2
    assert not membership.connection_lost(LATE, 0.0).messages and membership.ended is None, (
        "it was never part of the job"
    )
    membership = started()
    assert said(membership.greet(LATE, "h"), End) and ready_again(membership) == ([], [])


def test_what_is_nobodys_fault_ends_the_job_also_when_rank_0_is_lost():
    membership = started()
    membership.connection_lost(WorkerId(0), 0.0)
    (end,) = said(membership.fail("the store is gone"), End)
    assert end.failed and end.reason == "the store is gone"


@pytest.mark.parametrize(
    "message",
    [
        Fatal(2, "nobody answers"),
        Left(2, 3),
        Heartbeat(2, 1, 1, Activity(WAITS, "")),
        Stepped(2, 0, 1),
        Missing(2, 0, "x", "0.0"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_nothing_that_it_says_counts(message):
    membership = started()
    ready_again(membership)
    out = membership.receive(replace(message, incarnation=1), 0.0)
    assert not out.messages and not out.events and membership.ended is None


def test_its_end_is_nobodys():
    membership = started()
    ready_again(membership)
    pulse, exited = SupervisorHeartbeat(2, True, incarnation=1), Exited(2, -9, 0.0, incarnation=1)
    for out in (membership.receive(pulse, 0.0), membership.connection_lost(LATE, 0.0), membership.receive(exited, 0.0)):
        assert not out.messages and not out.events
    assert len(membership.roster) == 4 and not membership.lost
    assert step(membership, 0, 1), "and rank 2's steps count"


def test_what_is_said_of_the_next_incarnation_does_not_count_for_the_lost_one():
    membership = started()
    step(membership, 0, 1)
    membership.connection_lost(WorkerId(2), 0.0)
    ready_again(membership)
    membership.receive(Exited(2, -9, 0.0, incarnation=1), 0.0)
    assert membership.unreachable == {WorkerId(2)}
    (confirmed,) = membership.receive(Exited(2, -9, 0.0), 0.0).events
    assert confirmed.kind == "confirmed" and not membership.unreachable


def test_messages_say_of_which_process_they_are():
    for message in (
        Stepped(2, 0, 1, incarnation=1),
        Contribution(2, 1, "loss", {}, 1, incarnation=1),
        Fence(2, "why", incarnation=1),
    ):
        assert decode(encode(message)) == message and message.worker == LATE
    assert Stepped(2, 0, 1).worker == WorkerId(2)


# --- who is given up with whom --------------------------------------------------------------------------


def with_unit(unit: str) -> Membership:
    """3 replicas of 2 stages, which have applied step 1."""
    membership = Membership(6)
    given = job(replicas=3, unit=unit)
    for rank in range(6):
        membership.receive(Ready(member(rank, replicas=3), 0, given), 0.0)
    agree(membership, 0, dict.fromkeys(range(6), 0))
    step(membership, 0, 1, range(6))
    return membership


@pytest.mark.parametrize("unit, gone", [("worker", [1]), ("replica", [1, 4])])
def test_a_loss_takes_its_unit_with_it(unit, gone):
    membership = with_unit(unit)
    out = membership.receive(Exited(1, -9, 0.0), 0.0)
    assert [event.details["rank"] for event in out.events if event.kind == "lost"] == gone
    (generation,) = said(out, Generation)
    assert [one.rank for one in generation.members] == [rank for rank in range(6) if rank not in gone]
    assert generation.cause == "loss of 1.0"
    fenced = [(whom, one.rank) for whom, one in out.messages if isinstance(one, Fence)]
    assert fenced == [
        (whom, rank) for rank in gone[1:] for whom in (SupervisorOf(rank, former=True), WorkerId(rank))
    ], "the dead one needs none"
    assert membership.lost == {WorkerId(rank) for rank in gone}
    assert membership.unreachable == {WorkerId(rank) for rank in gone[1:]}
    assert not membership.receive(Exited(4, -9, 0.0), 0.0).messages or 4 not in gone


def test_what_a_unit_takes_may_leave_a_stage_empty():
    membership = with_unit("replica")
    for rank in (0, 1):
        membership.receive(Exited(rank, -9, 0.0), 0.0)
        membership.receive(Exited(rank + 3, -9, 0.0), 0.0)
    (end,) = said(membership.receive(Exited(5, -9, 0.0), 0.0), End)
    assert end.reason.startswith("stage 0 has no live worker left")
