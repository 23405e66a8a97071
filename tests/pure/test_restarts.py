"""Who follows a lost worker: when its own supervisor starts the next process, and who from elsewhere takes the seat."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest

from recycle_plugin.core.coordinator import losses
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, Joiner, SupervisorOf
from recycle_plugin.core.coordinator.facts.restarts import Restarts
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.messages.activity import COMPUTES, ELSEWHERE, Activity
from recycle_plugin.core.messages.from_coordinator import End, Fence, Lease, Recorded, Refused, Restart, Seated
from recycle_plugin.core.messages.from_workers import (
    Contribution,
    Crashed,
    Exited,
    Fatal,
    Heartbeat,
    Leaving,
    Left,
    Note,
    Ready,
    Stepped,
    SupervisorHeartbeat,
    Terminate,
    Unguarded,
)
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.core.vocabulary.roster import WorkerId
from tests.support.membership import agree, job, member, orders, said, started, step
from tests.support.played import DEADLINE_S, HEARTBEAT_S, IDLE_S, Played

NEXT = WorkerId(2, 1)


def dies(membership: Membership, incarnation: int = 0, now: float = 10.0, rank: int = 2, code: int = -9):
    return membership.receive(Exited(rank, code, now, incarnation=incarnation), now)


def kinds(out: CoordinatorOutput, *wanted: str) -> list[str]:
    return [event.kind for event in out.events if event.kind in wanted]


def come(membership: Membership, incarnation: int, rank: int = 2) -> None:
    worker = WorkerId(rank, incarnation)
    assert membership.identify(worker) == worker
    assert membership.greet(worker, "h") == CoordinatorOutput()


def job_of(rejoin: str | int = "always", **more: object) -> Membership:
    """2 x 2, whose workers have connected."""
    membership = started(rejoin=rejoin, **more)
    for rank in range(4):
        assert membership.identify(WorkerId(rank)) == WorkerId(rank)
    return membership


# --- the policy --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rejoin, waits",
    [
        ("always", [1, 2, 4, 8, 16]),
        ("never", []),
        (0, []),
        (1, [1]),
        (9, [1, 2, 4, 8, 16, 32, 60, 60, 60]),
    ],
)
def test_each_time_it_waits_longer_and_then_it_is_given_up(rejoin, waits):
    policy, found, out = Restarts(rejoin), [], CoordinatorOutput()
    while (after_s := policy.decide(WorkerId(2, len(found)), "rank 2", "it died", False, False, out, 2)) is not None:
        found.append(after_s)
        policy.in_vain(2)
        assert len(found) < 20
    assert found == waits
    assert [event.kind for event in out.events] == ["restart"] * len(waits) + ["not_restarted"] * bool(waits)
    if waits:
        assert out.events[0].text == "rank 2 is started again in 1 s: it died"
        again = "the last process" if rejoin == 1 else f"{len(waits)} processes in a row"
        assert out.events[-1].text == (
            f"rank 2 is not started again: {again} died before being admitted. It died; "
            "python -m recycle_plugin.launch --join takes its seat"
        )


def test_an_admission_begins_anew_and_each_rank_has_its_own_count():
    policy, out = Restarts("always"), CoordinatorOutput()
    for _ in range(4):
        policy.in_vain(2)
    assert policy.decide(WorkerId(3), "rank 3", "it died", False, False, out, 3) == 1
    assert policy.decide(WorkerId(2, 4), "rank 2", "it died", False, False, out, 2) == 16
    policy.admitted(2)
    assert policy.decide(WorkerId(2, 5), "rank 2", "it died", False, False, out, 2) == 1
    assert out.events[1].details == {"rank": 2, "incarnation": 4, "after_s": 16, "in_vain": 4}


def test_nobody_is_started_once_the_job_ends_and_that_is_no_news():
    out = CoordinatorOutput()
    assert Restarts("always").decide(WorkerId(2), "rank 2", "it died", True, False, out, 2) is None and not out.events


# --- who is started again ----------------------------------------------------------------------------


def test_a_death_that_its_supervisor_has_seen_is_answered_with_an_order():
    membership = job_of()
    out = dies(membership)
    assert orders(out) == [(2, 1, 1.0)] and kinds(out, "lost", "restart") == ["lost", "restart"]
    assert orders(dies(membership)) == [], "it says so again, since its connection broke"


def test_a_broken_connection_is_no_proof_that_it_is_dead():
    membership = job_of()
    assert orders(membership.connection_lost(WorkerId(2), 0.0)) == []
    out = dies(membership)
    assert orders(out) == [(2, 1, 1.0)] and kinds(out, "confirmed", "restart") == ["confirmed", "restart"]


def test_who_was_fenced_is_started_again_once_it_is_dead():
    membership = job_of()
    losses.give_up(membership.state, WorkerId(2), Cause.STUCK, "it is stuck")
    out = membership.state.taken_out()
    assert said(out, Fence) and not orders(out)
    assert orders(dies(membership)) == [(2, 1, 1.0)]


def test_a_planned_leave_stays_away():
    membership = job_of()
    step(membership, 0, 1)
    membership.receive(Leaving(2, "SIGTERM"), 0.0)
    agree(membership, 1, dict.fromkeys(range(4), 2))
    membership.receive(Left(2, planned=True), 0.0)
    assert orders(dies(membership, code=0)) == [] and membership.empty == {2}, "until it is admitted"


@pytest.mark.parametrize("how", ("failed", "planned", "through"))
def test_once_the_job_ends_nobody_is_started(how):
    membership = job_of()
    if how == "failed":
        membership.fail("the store is gone")
    elif how == "planned":
        membership.receive(Terminate(0, "SIGTERM"), 0.0)
    else:
        membership.receive(Left(0), 0.0)
    out = dies(membership)
    assert not orders(out) and not kinds(out, "restart", "not_restarted")


def test_where_the_guard_is_gone_nobody_is_left_to_start_it():
    membership = job_of()
    membership.receive(Unguarded(2, 77), 0.0)
    out = dies(membership)
    assert not orders(out) and kinds(out, "restart", "not_restarted") == ["not_restarted"]


def test_a_supervisor_goes_with_a_worker_that_says_that_all_is_well_and_starts_none():
    membership = job_of()
    membership.connection_lost(WorkerId(2), 0.0)
    out = dies(membership, code=0)
    assert not orders(out) and kinds(out, "restart", "not_restarted") == ["not_restarted"]
    membership = newcomer()
    out = dies(membership, 1, code=0)
    assert not orders(out) and kinds(out, "restart", "not_restarted") == ["not_restarted"]


def test_before_the_start_a_death_ends_the_job_as_ever():
    membership = Membership(4)
    membership.receive(Ready(member(2), 0, job(rejoin="always")), 0.0)
    out = dies(membership)
    assert membership.ended.failed and not orders(out)


# --- a newcomer --------------------------------------------------------------------------------------


def newcomer(**more: object) -> Membership:
    """Rank 2 is lost, and its next process has connected."""
    membership = job_of(**more)
    dies(membership)
    agree(membership, 1, {0: 0, 1: 0, 3: 0})
    come(membership, 1)
    return membership


def test_it_is_welcome_says_when_its_engine_stands_and_is_no_member():
    membership = newcomer()
    out = membership.receive(Ready(replace(member(2), incarnation=1), 0, job(rejoin="always")), 0.0)
    (event,) = out.events
    assert event.kind == "newcomer" and (event.details["rank"], event.details["incarnation"]) == (2, 1)
    assert [(whom, type(told)) for whom, told in out.messages] == [(NEXT, Recorded)] and membership.is_outside(NEXT)
    assert NEXT not in membership.roster.workers
    assert step(membership, 1, 1, [0, 1, 3]), "and the others go on without it"


def test_who_comes_back_with_other_settings_is_told_which_and_ends():
    membership = newcomer()
    out = membership.receive(Ready(replace(member(2), incarnation=1), 0, job(rejoin="always", seed=5)), 0.0)
    (event,) = out.events
    assert event.kind == "warning" and "seed is 0 in the job and 5 in the newcomer" in event.text
    assert [(whom, type(told)) for whom, told in out.messages] == [(NEXT, End)] and out.messages[0][1].failed
    assert membership.ended is None and not membership.state.joining


@pytest.mark.parametrize(
    "message, told",
    [
        (Heartbeat(2, 7, 1, Activity(COMPUTES, "x")), ""),
        (Fatal(2, "its settings are others"), "warning"),
        (Crashed(2, "KeyError: 0", "Traceback …"), "error"),
        (Note(2, "data", "it reads iterators"), "data"),
        (Stepped(2, 1, 1), ""),
        (Contribution(2, 1, "loss", {"0.0": 1.0}, 1), ""),
        (Left(2, 3), ""),
        (Leaving(2, "SIGTERM"), ""),
    ],
    ids=lambda one: type(one).__name__,
)
def test_nothing_that_it_says_costs_the_others_anything(message, told):
    membership = newcomer()
    before = json.dumps(dump(membership))
    out = membership.receive(replace(message, incarnation=1), 0.0)
    membership.state.attendance.failure_detector._newcomers.clear()  # what it is at is noted
    assert json.dumps(dump(membership)) == before and membership.ended is None
    assert [event.kind for event in out.events] == ([told] if told else [])
    assert [(whom, type(one)) for whom, one in out.messages] == (
        [(NEXT, Lease)] if isinstance(message, Heartbeat) else []
    )


@pytest.mark.parametrize("stopped, limit_s", ((True, DEADLINE_S), (False, IDLE_S)))
def test_one_that_does_nothing_is_ended_so_that_the_next_one_is_started(stopped, limit_s):
    played = Played(newcomer())
    for _ in range(round((limit_s + 2) / TICK_S)):
        played.membership.receive(SupervisorHeartbeat(2, stopped, 0.0, incarnation=1), played.now)
        if not stopped:
            played.membership.receive(Heartbeat(2, 7, 1, Activity(ELSEWHERE, "its script"), incarnation=1), played.now)
        for rank in (0, 1, 3):
            played.signs(rank)
        if fences := said(played.tick(TICK_S), Fence):
            break
    assert {fence.worker for fence in fences} == {NEXT} and NEXT not in played.membership.lost
    assert [event.kind for event in played.outs[-1].events][-1] == "turned_down"
    out = played.membership.receive(Exited(2, -9, played.now, incarnation=1), played.now)
    assert [one.incarnation for one in said(out, Restart)] == [2]


@pytest.mark.parametrize("speaks", (True, False), ids=("its supervisor speaks", "silent"))
def test_one_of_which_nothing_is_heard_once_its_engine_stands_is_ended(speaks):
    """Its host may be cut off behind a takeover: it was announced for step after step, and all waited in each."""
    played = Played(newcomer())
    played.membership.receive(Ready(replace(member(2), incarnation=1), 0, job(rejoin="always")), played.now)
    fences = []
    for _ in range(round((HEARTBEAT_S + 2) / TICK_S)):
        if speaks:
            played.membership.receive(SupervisorHeartbeat(2, False, 0.0, incarnation=1), played.now)
        for rank in (0, 1, 3):
            played.signs(rank)
        fences += said(played.tick(TICK_S), Fence)
    assert {fence.worker for fence in fences} == (set() if speaks else {NEXT}) and NEXT not in played.membership.lost


def test_where_it_dies_the_next_one_comes_later_and_at_last_it_is_given_up():
    membership = job_of()
    out, waits = dies(membership), []
    while found := orders(out):
        (((rank, incarnation, after_s)),) = found
        assert (rank, incarnation) == (2, len(waits) + 1) and membership.empty == {2}
        waits.append(after_s)
        if incarnation % 2:  # one that dies before it has connected is no better
            come(membership, incarnation)
            assert membership.connection_lost(WorkerId(2, incarnation), 0.0) == CoordinatorOutput()
        out = dies(membership, incarnation)
        assert dies(membership, incarnation) == CoordinatorOutput(), "said twice"
    assert waits == [1, 2, 4, 8, 16] and kinds(out, "not_restarted") == ["not_restarted"]
    assert len(membership.roster) == 3 and not membership.unreachable and membership.lost == {WorkerId(2)}
    assert not kinds(out, "left", "lost")


@pytest.mark.parametrize("committed, in_a_row", ((9, 1), (8, 2)), ids=("at work", "at once"))
def test_who_was_admitted_is_a_member_and_once_it_is_lost_counted_anew(committed, in_a_row):
    """Unless it dies before a step was committed with it, and may have had no work yet."""
    membership = newcomer()
    dies(membership, 1)
    come(membership, 2)
    membership.state.vacancies.entered(WorkerId(2, 2))
    membership.state.vacancies.admitted(WorkerId(2, 2), 7)
    membership.state.vacancies.committed(committed)
    assert not membership.is_outside(WorkerId(2, 2)) and membership.empty == frozenset()
    membership.state.attendance.roster = type(membership.roster)(
        (*membership.roster, replace(member(2), incarnation=2))
    )
    assert orders(dies(membership)) == orders(dies(membership, 1)) == [], "old news"
    assert orders(dies(membership, 2)) == [(2, 3, 1.0 if in_a_row == 1 else 4.0)]


def test_another_process_of_its_rank_is_a_stranger_before_and_after():
    """A launcher that was started twice: its worker has a number of its own, and is turned away."""
    membership = job_of()
    stranger = membership.identify(WorkerId(2))
    assert stranger == WorkerId(2, 1) and kinds(membership.greet(stranger, "h"), "late")
    out = dies(membership)
    assert orders(out) == [(2, 2, 1.0)], "nobody else has had that number"
    for claimed in (WorkerId(2), WorkerId(2, 1), WorkerId(2, 9)):
        stranger = membership.identify(claimed)
        assert stranger.incarnation > 2 and kinds(membership.greet(stranger, "h"), "late")
    come(membership, 2)
    again = membership.identify(WorkerId(2, 2))
    assert again.incarnation > 2 and kinds(membership.greet(again, "h"), "late"), "it is there already"


def test_a_supervisor_that_comes_again_hears_its_order_again_with_the_seconds_that_are_left():
    membership = job_of()
    dies(membership)
    dies(membership, 1)
    dies(membership, 2, now=20.0)
    assert membership.supervisor(2, False, 20.5) == CoordinatorOutput()
    assert orders(membership.supervisor(2, True, 21.0)) == [(2, 3, 3.0)]
    assert orders(membership.supervisor(2, True, 99.0)) == [(2, 3, 0.0)]
    assert orders(membership.supervisor(1, True, 21.0)) == []
    come(membership, 3)
    assert orders(membership.supervisor(2, True, 99.0)) == []


@pytest.mark.parametrize("how", ("failed", "finished"))
def test_the_jobs_end_ends_newcomers_and_sends_spares_home(how):
    membership = newcomer()
    membership.join(1, "spare", True, 0.0)
    if how == "failed":
        out = membership.fail("the store is gone")
    else:
        for rank in (0, 1, 3):
            out = membership.receive(Left(rank), 0.0)
    assert (SupervisorOf(2, former=True), Fence(2, "the job is over", incarnation=1)) in out.messages
    (refused,) = [one for whom, one in out.messages if whom == Joiner(1)]
    assert refused.code == 0 and refused.reason.startswith("the job is over, and no seat was lost")
    assert not orders(dies(membership, 1))
    (late,) = said(membership.join(2, "x", True, 0.0), Refused)
    assert late == Refused("the job is over") and late.code == 1


# --- from elsewhere ----------------------------------------------------------------------------------


def seated(out: CoordinatorOutput, number: int) -> int | None:
    found = [one.rank for whom, one in out.messages if whom == Joiner(number) and isinstance(one, Seated)]
    return found[0] if found else None


def test_who_joins_gets_the_seat_that_nobody_else_is_about_to_fill():
    """... rather than one in its back-off, which it gets where that is all there is."""
    membership = job_of(replicas=4, stages=1)
    membership.receive(Unguarded(3, 77), 0.0)
    dies(membership, rank=1)
    dies(membership, rank=3)
    out = membership.join(1, "x", True, 10.5)
    assert seated(out, 1) == 3 and orders(out) == [(3, 1, 0.0)] and not said(out, Fence)
    out = membership.join(2, "y", True, 10.5)
    assert seated(out, 2) == 1 and orders(out) == [(1, 2, 0.0)]
    assert (SupervisorOf(1, former=True), Fence(1, "host y takes its seat", incarnation=1)) in out.messages
    out = membership.join(3, "z", True, 10.5)
    assert seated(out, 3) is None and kinds(out, "spare") == ["spare"]
    out = membership.join(4, "z", False, 10.5)
    assert [one for _, one in out.messages] == [Refused("no seat is free, and --no-wait was given")]


def test_a_process_that_is_being_started_is_not_in_anybodys_way():
    membership = job_of()
    dies(membership)
    assert seated(membership.join(1, "x", True, 11.5), 1) is None


def test_a_spare_takes_the_next_loss_in_place_of_the_seats_own_supervisor():
    membership = job_of()
    for number in (1, 2):
        membership.join(number, f"host{number}", True, 0.0)
    membership.joiner_gone(1)
    out = dies(membership)
    assert seated(out, 2) == 2 and orders(out) == [(2, 1, 0.0)]
    assert kinds(out, "restart", "joined", "not_restarted") == ["joined"]
    assert [one for whom, one in out.messages if whom == Joiner(1)] == []
    come(membership, 1)
    assert orders(dies(membership, 1)) == [(2, 2, 2.0)], "there is no other spare, and its host starts it again"


def test_a_spare_takes_the_seat_of_a_newcomer_that_dies():
    membership = newcomer()
    membership.join(1, "x", True, 0.0)
    out = dies(membership, 1)
    assert seated(out, 1) == 2 and orders(out) == [(2, 2, 0.0)]


def test_where_nobody_is_started_again_a_seat_can_be_taken_all_the_same():
    membership = job_of("never")
    assert not orders(dies(membership))
    assert seated(membership.join(1, "x", False, 0.0), 1) == 2


def silent(membership: Membership, rank: int) -> None:
    losses.give_up(membership.state, WorkerId(rank), Cause.SILENT, "nothing was heard")
    membership.state.taken_out()


def test_a_host_that_is_silent_has_a_seat_to_give_and_one_that_may_come_again_has_not():
    membership = job_of(heartbeat_timeout_s=3.0)
    membership.connection_lost(WorkerId(2), 0.0)
    assert seated(membership.join(1, "x", True, 0.0), 1) is None
    membership.supervisor(2, False, 1.0)
    assert seated(membership.tick(3.9), 1) is None
    out = membership.tick(4.1)
    assert seated(out, 1) == 2 and orders(out) == [(2, 1, 0.0)]
    assert not orders(dies(membership)), "its host is back, and the seat is another's"
    membership = job_of(heartbeat_timeout_s=inf)
    silent(membership, 2)
    assert seated(membership.join(1, "x", False, 0.0), 1) == 2


def test_a_silent_host_that_comes_back_starts_its_own_worker_again():
    membership = job_of()
    silent(membership, 2)
    assert orders(dies(membership)) == [(2, 1, 1.0)]
    assert seated(membership.join(1, "x", True, 99.0), 1) is None, "it is heard of again"


def test_a_newcomer_whose_host_is_gone_leaves_a_seat():
    membership = newcomer(heartbeat_timeout_s=3.0)
    membership.supervisor(2, False, 20.0)
    assert not kinds(membership.tick(22.0), "not_restarted")
    out = membership.tick(23.5)
    assert kinds(out, "not_restarted") == ["not_restarted"]
    assert (NEXT, Fence) in [(whom, type(one)) for whom, one in out.messages]
    assert seated(membership.join(1, "x", False, 24.0), 1) == 2
    out = membership.tick(26.9)
    assert not kinds(out, "not_restarted") and not said(out, Fence), "the supervisor that is there now is another one"


def test_a_newcomer_of_whose_host_nothing_is_heard_any_more_leaves_a_seat():
    """Its supervisor's connection stands, since nobody has said that it is broken."""
    membership = newcomer(heartbeat_timeout_s=3.0)
    membership.join(1, "x", True, 20.0)
    for now in (20.0, 22.0, 24.0):
        membership.receive(SupervisorHeartbeat(2, False, incarnation=1), now)
        assert seated(membership.tick(now + 1), 1) is None
    out = membership.tick(27.5)
    assert seated(out, 1) == 2 and orders(out) == [(2, 2, 0.0)]
    assert (NEXT, Fence) in [(whom, type(one)) for whom, one in out.messages]
    membership.receive(SupervisorHeartbeat(2, False, incarnation=1), 30.0)
    assert not orders(dies(membership, 1)), "its host is back, and the seat is another's"


def test_a_host_that_loses_power_before_it_starts_a_newcomer_leaves_a_seat():
    """Its supervisor's connection stands, and nothing says that the order has come."""
    membership = job_of(heartbeat_timeout_s=3.0)
    membership.join(1, "x", True, 0.0)
    silent(membership, 2)
    membership.joiner_gone(1)
    assert orders(dies(membership)) == [(2, 1, 1.0)], "at 10 s; due at 11 s"
    assert not kinds(membership.tick(13.5), "not_restarted")
    out = membership.tick(14.5)
    assert kinds(out, "not_restarted") and (NEXT, Fence) in [(whom, type(one)) for whom, one in out.messages]
    assert seated(membership.join(2, "x", False, 15.0), 2) == 2


def test_a_supervisor_that_comes_again_has_the_whole_time_to_start_a_newcomer():
    membership = job_of(heartbeat_timeout_s=3.0)
    assert orders(dies(membership)) == [(2, 1, 1.0)], "at 10 s; due at 11 s"
    membership.supervisor(2, False, 10.5)
    assert not kinds(membership.tick(13.0), "not_restarted")
    assert orders(membership.supervisor(2, True, 13.4)) == [(2, 1, 0.0)]
    assert not kinds(membership.tick(16.0), "not_restarted")
    assert kinds(membership.tick(16.5), "not_restarted")
    assert orders(dies(membership, 1, 17.0)) == [(2, 2, 2.0)], "it says that it has not started the one that was fenced"


def test_a_newcomer_whose_host_was_silent_for_a_while_has_a_successor_there_once_that_is_heard_of():
    membership = newcomer(heartbeat_timeout_s=3.0)
    membership.receive(SupervisorHeartbeat(2, False, incarnation=1), 20.0)
    out = membership.tick(23.5)
    assert kinds(out, "not_restarted") and not orders(out)
    assert orders(dies(membership, 1)) == [(2, 2, 2.0)]
    assert not orders(dies(membership, 1)), "once"


def test_all_of_it_survives_being_written_down():
    membership = newcomer(replicas=4, stages=1, heartbeat_timeout_s=3.0)
    dies(membership, 1)
    membership.receive(Unguarded(1, 7), 0.0)
    membership.supervisor(3, False, 1.0)
    membership.join(1, "x", True, 20.0)
    again = load(json.loads(json.dumps(dump(membership), allow_nan=False)))
    assert dump(again) == dump(membership)
    for rank in (2, 3, 1):
        assert dies(again, rank=rank) == dies(membership, rank=rank) and dump(again) == dump(membership)
    assert orders(again.supervisor(2, True, 11.0)) == orders(membership.supervisor(2, True, 11.0)) == [(2, 2, 1.0)]
