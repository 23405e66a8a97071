"""Where logs are: who serves them, what a replay is told of that, and what a lost host takes along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, SupervisorOf
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.from_coordinator import LogsAt, Replay, ServeLogs
from recycle_plugin.core.messages.from_workers import (
    CatchUp,
    Durable,
    Exited,
    Left,
    LogFolder,
    Logged,
    LogsServed,
    Ready,
)
from recycle_plugin.core.vocabulary.roster import WorkerId
from tests.support.membership import DEADLINES, agree, job, member, said, step

GONE_S = DEADLINES.heartbeat_timeout_s + 0.1
LOGGED = job(log=True, rejoin="always")
HOSTS = ("alpha", "beta", "alpha", "beta")  # by rank: each has a replica, stage 0 is that of the ranks 0 and 1


def own_disk(rank: int) -> str:
    return HOSTS[rank]


def shared(rank: int) -> str:
    return "all"


def ready(rank: int, token: str, incarnation: int = 0) -> Ready:
    seated = replace(member(rank, HOSTS[rank]), incarnation=incarnation)
    return Ready(seated, 0, LOGGED, LogFolder("/log", token, f"at {HOSTS[rank]}"))


def job_of(token: Callable[[int], str]) -> Membership:
    """2 x 2 that logs, each where ``token(rank)`` says; step 1 has a checkpoint, 2 is committed and on all disks."""
    membership = Membership(4)
    for rank in range(4):
        membership.identify(WorkerId(rank))
        membership.supervisor(rank, True, 0.0)
        (order,) = said(membership.receive(ready(rank, token(rank)), 0.0), ServeLogs)
        assert order.rank == rank
        membership.receive(LogsServed(rank, token(rank), f"supervisor {rank}"), 0.0)
    agree(membership, 0, dict.fromkeys(range(4), 0))
    for number in (1, 2):
        step(membership, 0, number)
        for rank in range(4):
            membership.receive(Logged(rank, number), 0.0)
        if number == 1:
            membership.receive(Durable(0, 1, "a folder"), 0.0)
    return membership


def lose_beta(membership: Membership, supervisors: bool = True, now: float = 1.0) -> None:
    for rank in (1, 3):
        membership.receive(Exited(rank, -9, now), now)
        if supervisors:
            membership.supervisor(rank, False, now)


def told(out: CoordinatorOutput) -> list[dict]:
    return [event.details for event in out.events if event.kind == "log_gone"]


def why_along(membership: Membership, stage: int) -> str:
    """Why others have to replay along with a stage, the first of them."""
    return next(iter(membership.state.logs.along(membership.committed, (stage,)).values()), "")


# --- who serves ----------------------------------------------------------------------------------------


def test_a_replay_is_told_who_serves_what_it_reads():
    """Of its own stage and of those beside it, in each folder at whoever serves that."""
    membership = job_of(own_disk)
    for rank in (2, 3):
        membership.receive(Exited(rank, -9, 1.0), 1.0)
    membership.identify(WorkerId(2, 1))
    membership.greet(WorkerId(2, 1), "alpha")
    membership.receive(ready(2, "alpha", 1), 1.0)
    (replay,) = said(membership.receive(CatchUp(2, incarnation=1), 1.0), Replay)
    assert replay.logs == (
        LogsAt("alpha", ("supervisor 0", "supervisor 2"), (0, 2)),
        LogsAt("beta", ("supervisor 1", "supervisor 3"), (1, 3)),
    )


def test_where_all_see_one_folder_nobody_is_asked():
    membership = job_of(shared)
    assert membership.state.log_places.of(range(4)) == ()


def test_the_next_supervisor_of_a_rank_is_to_serve_too():
    membership = job_of(own_disk)
    membership.supervisor(1, False, 1.0)
    out = membership.supervisor(1, True, 1.1)
    assert [whom for whom, message in out.messages if isinstance(message, ServeLogs)] == [SupervisorOf(1)]
    membership.receive(LogsServed(1, "beta", "another port"), 1.2)
    membership.receive(LogsServed(3, "of another host", "elsewhere"), 1.2)
    assert membership.state.log_places.of((1, 3)) == (LogsAt("beta", ("another port", "supervisor 3"), (1, 3)),)


def test_only_ranks_are_named_of_which_something_is_wanted():
    assert job_of(own_disk).state.log_places.of((1,)) == (LogsAt("beta", ("supervisor 1", "supervisor 3"), (1,)),)


# --- a host that is gone ---------------------------------------------------------------------------------


def test_a_lost_host_takes_its_logs_along_until_the_next_checkpoint():
    """That one has all that its workers may have begun to log."""
    membership = job_of(own_disk)
    lose_beta(membership)
    assert not told(membership.tick(1.1)) and not why_along(membership, 0)
    assert told(membership.tick(1.0 + GONE_S)) == [{"ranks": [1, 3], "hosts": ["beta"], "stages": [0, 1], "step": 2}]
    assert why_along(membership, 0) == ("the log of rank 3 lacks records of step 2: it was on host beta, which is gone")
    assert not told(membership.tick(2.0 + GONE_S)), "once"
    agree(membership, membership.regrouping, {0: 2, 2: 2})
    for number in (3, 4, 5):
        step(membership, membership.generation, number, [0, 2])
    membership.receive(Durable(0, 3, "a folder"), 5.0)  # was under way when they were lost
    assert "of step 4" in why_along(membership, 0)
    membership.receive(Durable(0, 4, "a folder"), 5.0)
    assert not why_along(membership, 0) and not why_along(membership, 1)


def test_a_stage_that_needs_them_has_another_one_replay_along_and_says_why():
    membership = job_of(own_disk)
    lose_beta(membership)
    membership.tick(1.0 + GONE_S)
    out = membership.receive(Exited(2, -9, 5.0), 5.0)
    (decision,) = [event for event in out.events if event.kind == "recovery"]
    assert decision.details["way"] == "replay" and list(decision.details["along"]) == ["0"]
    assert "rank 1 lacks records of step 2: it was on host" in decision.details["along"]["0"]


@pytest.mark.parametrize("where", (own_disk, shared))
@pytest.mark.parametrize("supervisors", (False, True))
def test_what_somebody_can_still_read_is_there(where, supervisors):
    """A host whose supervisors live serves its logs; and a folder that others see too is theirs."""
    membership = job_of(where)
    lose_beta(membership, supervisors)
    gone = told(membership.tick(1.0 + GONE_S))
    assert bool(gone) == bool(why_along(membership, 0)) == (supervisors and where is own_disk)


def test_what_is_older_than_the_last_checkpoint_is_missed_by_nobody():
    membership = job_of(own_disk)
    lose_beta(membership)
    agree(membership, membership.regrouping, {0: 2, 2: 2})
    for number in (3, 4, 5):
        step(membership, membership.generation, number, [0, 2])
    membership.receive(Durable(0, 4, "a folder"), 2.0)
    assert not told(membership.tick(1.0 + GONE_S)) and not why_along(membership, 0)


def test_who_has_left_as_planned_takes_its_log_along_too():
    """A host that is drained may be switched off."""
    membership = job_of(own_disk)
    for rank in (1, 3):
        membership.receive(Left(rank, planned=True), 1.0)
        membership.supervisor(rank, False, 1.0)
    assert [each["ranks"] for each in told(membership.tick(1.0 + GONE_S))] == [[1, 3]]
