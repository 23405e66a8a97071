"""What an operator asks of the coordinator: that seats leave, that a host is drained, and that a seat is held again."""

from __future__ import annotations

import json

import pytest

from recycle_plugin.core.coordinator import losses
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, Joiner
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN, Answer, Fence, Generation, Refused, Seated, Stay
from recycle_plugin.core.messages.from_operators import AskAdmit, AskDrain, AskLeave
from recycle_plugin.core.messages.from_workers import Exited, HostGoes, Leaving, Left, Ready, SurvivorReport, Terminate
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.roster import WorkerId
from tests.support.membership import agree, job, member, orders, said, step

HOSTS = ("alpha", "beta", "alpha", "beta")  # by rank: one replica each


def job_of(rejoin: str | int = "always") -> Membership:
    """2 x 2, whose workers have connected, of which rank r has seat (r % 2).(r // 2)."""
    membership = Membership(4)
    for rank, host in enumerate(HOSTS):
        membership.identify(WorkerId(rank))
        membership.receive(Ready(member(rank, host), 0, job(rejoin=rejoin)), 0.0)
    agree(membership, 0, dict.fromkeys(range(4), 0))
    step(membership, 0, 1)
    return membership


def leave(membership: Membership, seat: str = "0.1") -> tuple[Answer, CoordinatorOutput]:
    return membership.asked(AskLeave(seat), 5.0)


def drain(membership: Membership, host: str = "beta") -> tuple[Answer, CoordinatorOutput]:
    return membership.asked(AskDrain(host), 5.0)


def admit(membership: Membership, seat: str = "0.1") -> tuple[Answer, CoordinatorOutput]:
    return membership.asked(AskAdmit(seat), 5.0)


def refused(found: tuple[Answer, CoordinatorOutput]) -> str:
    """Why; nothing is done then, and the user hears of it."""
    answer, out = found
    assert not answer.done and not out.messages and [event.kind for event in out.events] == ["operator"]
    return answer.text


def goes(membership: Membership, *ranks: int) -> None:
    """The generation without them comes in force, and they go."""
    rest = [rank for rank in range(4) if rank not in ranks]
    step(membership, 0, 2)
    step(membership, 0, 3)
    agree(membership, membership.generation, dict.fromkeys(rest, 3))
    for rank in ranks:
        membership.receive(Left(rank, planned=True), 0.0)
        membership.receive(Exited(rank, 0, 0.0), 0.0)
    assert sorted(worker.rank for worker in membership.roster.workers) == rest


def dies(membership: Membership, rank: int = 2, incarnation: int = 0) -> CoordinatorOutput:
    return membership.receive(Exited(rank, -9, 0.0, incarnation=incarnation), 0.0)


# --- leaving -----------------------------------------------------------------------------------------


def test_a_seat_leaves_as_one_that_got_sigterm_does():
    asked, told = job_of(), job_of()
    answer, out = leave(asked)
    assert answer == Answer("seat 0.1 (rank 2) leaves at the next commit", True)
    same = told.receive(Leaving(2, "SIGTERM"), 5.0)
    assert [g.members for g in said(out, Generation)] == [g.members for g in said(same, Generation)] != []
    assert [event.kind for event in out.events] == [*(event.kind for event in same.events), "operator"]
    assert said(out, Stay) == said(same, Stay) == [Stay(2)]
    assert out.events[-1].text == "recycle leave 0.1: seat 0.1 (rank 2) leaves at the next commit"


def test_no_stage_is_left_without_a_worker():
    membership = job_of()
    leave(membership, "1.1")
    assert refused(leave(membership)) == "stage 1 would have no worker left"
    assert leave(membership, "0.0")[0].done, "another stage's"


def test_not_the_last_one_whose_other_is_only_being_let_in():
    membership = job_of()
    dies(membership)
    agree(membership, membership.generation, {0: 1, 1: 1, 3: 1})
    assert refused(leave(membership, "1.1")) == "stage 1 would have no worker left"


@pytest.mark.parametrize("ask", (leave, admit))
@pytest.mark.parametrize("name", ("0.9", "x", "", "0.1 ", "\ud800"))
def test_a_seat_that_is_none_is_named_with_those_that_are(ask, name):
    assert refused(ask(job_of(), name)) == f"there is no seat {name}: this job has 0.0, 0.1, 1.0, 1.1"


@pytest.mark.parametrize("ask", (leave, drain, admit))
def test_only_while_it_trains(ask):
    assert refused(ask(Membership(4))) == "training has not started yet"
    for ended in ("failed", "planned", "through"):
        membership = job_of()
        if ended == "failed":
            membership.fail("the store is gone")
        elif ended == "planned":
            membership.receive(Terminate(0, "SIGTERM"), 0.0)
        else:
            membership.receive(Left(0), 0.0)
        assert refused(ask(membership)) == "the job is about to end, or is over"


def test_who_is_not_there_cannot_leave():
    membership = job_of("never")
    dies(membership)
    assert refused(leave(membership)) == "no worker holds seat 0.1: it is lost, or has left"


def test_who_comes_back_is_held_back_until_it_is_admitted():
    membership = job_of()
    assert orders(dies(membership)) == [(2, 1, 1.0)]
    answer, out = leave(membership)
    assert answer == Answer("seat 0.1 was coming back, and stays away", True)
    assert Fence(2, "recycle leave 0.1", incarnation=1) in said(out, Fence)
    assert said(out, Stay) == [Stay(2, incarnation=1)]
    assert [event.kind for event in out.events] == ["held_back", "operator"]
    assert orders(dies(membership, 2, 1)) == [], "its process ends, if there was one"
    assert membership.join(1, "gamma", True, 0.0).messages == [], "a spare waits for a seat that is lost"
    answer, out = admit(membership)
    assert answer == Answer("seat 0.1: a spare on host gamma takes it", True)
    assert said(out, Seated) == [Seated(2)] and orders(out) == [(2, 2, 0.0)]


def test_whoever_is_lost_before_it_has_left_stays_away_too():
    membership = job_of()
    leave(membership)
    assert orders(dies(membership)) == [] and admit(membership)[0].done


# --- a host ------------------------------------------------------------------------------------------


def test_all_seats_of_a_host_leave_in_one_generation_or_none():
    membership = job_of()
    answer, out = drain(membership)
    assert answer == Answer("seat 1.0 (rank 1) and seat 1.1 (rank 3) leave at the next commit", True)
    (generation,) = said(out, Generation)
    assert [each.rank for each in generation.members] == [0, 2]
    assert refused(drain(membership, "alpha")) == "stage 0 would have no worker left"
    goes(membership, 1, 3)
    assert drain(membership)[0] == Answer("no worker is left on host beta, and none is started there", True)


def test_a_host_that_has_no_seat_is_named_with_those_that_have():
    assert refused(drain(job_of(), "gamma")) == "no seat is on host gamma: the job's are on alpha, beta"


def test_on_a_drained_host_nobody_is_started_and_others_take_its_lost_seats():
    membership = job_of()
    assert orders(dies(membership, 3)) == [(3, 1, 1.0)]
    agree(membership, membership.generation, {0: 1, 1: 1, 2: 1})
    answer, out = drain(membership)
    assert answer.text == "seat 1.0 (rank 1) leaves at the next commit"
    assert said(out, Fence)[0].worker == WorkerId(3, 1) and set(said(out, Stay)) == {Stay(1), Stay(3, incarnation=1)}
    assert orders(membership.supervisor(3, True, 6.0)) == []
    out = membership.join(2, "gamma", False, 7.0)
    assert said(out, Seated) == [Seated(3)], "the one that was lost, and not the one that leaves"


def test_spares_on_a_drained_host_go():
    membership = job_of()
    membership.join(1, "beta", True, 0.0)
    membership.join(2, "gamma", True, 0.0)
    _, out = drain(membership)
    assert [(whom, one) for whom, one in out.messages if isinstance(one, Refused)] == [
        (Joiner(1), Refused("host beta is drained", code=0))
    ]


# --- admitting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rejoin", ("always", "never"))
def test_who_has_left_is_started_again_by_its_own_supervisor(rejoin):
    """Also as it is from the dump of the coordinator's state; whoever asks for a lost seat does not get it."""
    membership = job_of(rejoin)
    leave(membership)
    assert refused(admit(membership)) == "seat 0.1 (rank 2) is leaving: admit it once it has left"
    goes(membership, 2)
    membership = load(json.loads(json.dumps(dump(membership))))
    assert membership.join(1, "gamma", False, 0.0).messages == [
        (Joiner(1), Refused("no seat is free, and --no-wait was given"))
    ]
    answer, out = admit(membership)
    assert answer == Answer("seat 0.1: its supervisor starts it again", True) and orders(out) == [(2, 1, 0.0)]
    assert refused(admit(membership)) == "seat 0.1 is coming back already"
    assert membership.identify(WorkerId(2, 1)) == WorkerId(2, 1)
    assert membership.greet(WorkerId(2, 1), "alpha") == CoordinatorOutput()


def test_who_is_live_is_not_admitted():
    assert refused(admit(job_of())) == "seat 0.1 (rank 2) is live"


def test_who_is_not_known_to_be_dead_is_not_admitted():
    membership = job_of()
    losses.give_up(membership.state, WorkerId(2), Cause.STUCK, "it is stuck")
    membership.state.taken_out()
    assert refused(admit(membership)).startswith("seat 0.1 is lost, but its process may still run")


def test_who_was_given_up_has_all_its_tries_again():
    membership = job_of(1)
    assert orders(dies(membership)) == [(2, 1, 1.0)] and orders(dies(membership, 2, 1)) == []
    answer, out = admit(membership)
    assert answer.done and orders(out) == [(2, 2, 0.0)]
    assert orders(dies(membership, 2, 2)) == [], "once more in vain"


def test_where_nobody_is_left_to_start_it_the_next_that_comes_takes_it():
    membership = job_of()
    leave(membership)
    goes(membership, 2)
    membership.supervisor(2, False, 1.0)
    answer, out = admit(membership)
    assert answer.done and orders(out) == []
    assert (
        answer.text
        == "seat 0.1: no process is left on host alpha to start it: the next one started with --join takes it"
    )
    assert said(membership.join(1, "gamma", False, 9.0), Seated) == [Seated(2)]


def test_a_supervisor_that_comes_again_hears_that_it_is_to_stay():
    membership = job_of()
    leave(membership)
    assert said(membership.supervisor(2, True, 1.0), Stay) == [Stay(2)]
    assert said(membership.supervisor(1, True, 1.0), Stay) == []


def test_it_leaves_and_comes_back_again_and_again():
    """Each time it is another process, which trains as the first did."""
    membership = job_of()
    leave(membership)
    goes(membership, 2)
    admit(membership)
    again = WorkerId(2, 1)
    membership.identify(again), membership.greet(again, "alpha")
    assert refused(leave(membership, "1.1")) == "stage 1 would have no worker left", "the other is not back yet"
    assert membership.receive(SurvivorReport(2, 9, 0, "p", incarnation=1), 0.0).messages == []
    assert leave(membership)[0].text == "seat 0.1 was coming back, and stays away"
    assert orders(admit(membership)[1]) == [(2, 2, 0.0)]


# --- a host that goes --------------------------------------------------------------------------------


def goes_away(membership: Membership, rank: int, coordinator: bool = False) -> CoordinatorOutput:
    """Its worker says that its host is to be taken away."""
    return membership.receive(HostGoes(rank, "a notice", coordinator), 5.0)


def test_all_on_a_host_that_goes_leave_and_say_so_once():
    membership = job_of()
    out = goes_away(membership, 3)
    (generation,) = said(out, Generation)
    assert [each.rank for each in generation.members] == [0, 2]
    assert [event.text for event in out.events if event.kind == "notice"] == ["host beta is to be taken away: a notice"]
    again = goes_away(membership, 1)
    assert not again.messages and not again.events
    goes(membership, 1, 3)
    assert refused(leave(membership, "0.1")) == "stage 1 would have no worker left", "the job has not ended"


def test_a_host_that_goes_starts_nobody_and_whoever_comes_back_there_is_held_back():
    membership = job_of()
    assert orders(dies(membership, 3)) == [(3, 1, 1.0)]
    agree(membership, membership.generation, {0: 1, 1: 1, 2: 1})
    membership.identify(WorkerId(3, 1)), membership.greet(WorkerId(3, 1), "beta")
    out = membership.receive(HostGoes(3, "a notice", incarnation=1), 5.0)
    assert Fence(3, "host beta is to be taken away: a notice", incarnation=1) in said(out, Fence), "its own word counts"
    (generation,) = said(out, Generation)
    assert [each.rank for each in generation.members] == [0, 2]
    assert orders(membership.receive(Exited(3, -9, 0.0, incarnation=1), 6.0)) == []


def test_without_a_host_that_a_stage_needs_the_job_ends_with_a_checkpoint():
    membership = job_of("never")
    dies(membership, 3)
    agree(membership, membership.generation, {0: 1, 1: 1, 2: 1})
    goes_away(membership, 0)
    assert membership.ended is not None and membership.ended.code == TRY_AGAIN and not membership.ended.failed
    assert "stage 1 would have no worker left" in membership.ended.reason


def test_without_the_coordinators_host_the_job_ends_with_a_checkpoint():
    membership = job_of()
    out = goes_away(membership, 0, coordinator=True)
    assert membership.ended is not None and membership.ended.code == TRY_AGAIN and not membership.ended.failed
    assert "host alpha is to be taken away" in membership.ended.reason
    assert [event.kind for event in out.events][:1] == ["notice"]
    assert not goes_away(membership, 2, coordinator=True).events


def test_the_coordinators_host_goes_as_others_do_where_somebody_stands_by_elsewhere():
    membership = job_of()
    membership.state.stood_by_elsewhere = True
    (generation,) = said(goes_away(membership, 0, coordinator=True), Generation)
    assert [each.rank for each in generation.members] == [1, 3] and membership.ended is None


def test_nothing_goes_before_training_has_started():
    membership = Membership(4)
    membership.receive(Ready(member(0, "alpha"), 0, job()), 0.0)
    assert goes_away(membership, 0) == CoordinatorOutput()
