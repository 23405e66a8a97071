"""Which way a loss goes: the decision, what each way is predicted to cost, and what that is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle_plugin.commands.doctor_recovery import others
from recycle_plugin.core.coordinator import recovery_ways
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.output import CoordinatorOutput, Event
from recycle_plugin.core.coordinator.recovery_ways import (
    ASSUMED,
    END,
    START_UP_S,
    Decision,
    Group,
    Sharing,
    Time,
    Times,
    groups,
    no,
    reload,
    replay,
    reroute,
    shared,
    step_of,
)
from recycle_plugin.core.messages.from_workers import Durable, Note, Ready
from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.topology import Topology
from tests.support.membership import agree, job, member, started
from tests.support.replaying import lose, trained

TIMES = Times(Time(6.0), Time(0.5), Time(0.4), (Time(0.8), Time(1.0), Time(0.9, ASSUMED)))


# --- the four ways ------------------------------------------------------------------------------------


def test_the_first_way_that_can_be_is_taken_and_of_the_others_all_is_said():
    ways = (no("reroute", "nobody is left"), replay(TIMES, Time(0.25), 8, helpers=3), reload(TIMES, 8), END)
    decision = Decision(ways)
    assert decision.taken.cost == "8.5 s (start 6 s; load 0.5 s; 8 steps 2 s, shared with 3 helpers)"
    assert others(decision) == (
        "Reroute can't be: nobody is left; reload would cost 9.7 s (start 6 s; load 0.5 s; 8 steps 3.2 s): no job goes "
        "back by itself; whoever starts it again does so"
    )
    assert decision.details == {
        "way": "replay",
        "seconds": 8.5,
        "parts": {"start": 6.0, "load": 0.5, "steps": 2.0},
        "assumed": [],
        "instead": {
            "reroute": {"seconds": None, "parts": {}, "assumed": [], "why": "nobody is left"},
            "reload": {
                "seconds": 9.7,
                "parts": {"start": 6.0, "load": 0.5, "steps": 3.2},
                "assumed": [],
                "why": recovery_ways.BY_HAND,
            },
            "end": {"seconds": None, "parts": {}, "assumed": [], "why": ""},
        },
    }


@pytest.mark.parametrize(
    ("given", "taken"),
    (
        ((reroute(Time(0.0), None, 0.5), replay(TIMES, Time(1.0), 1), reload(TIMES, 1), END), "reroute"),
        ((no("reroute", "x"), replay(TIMES, Time(1.0), 1), reload(TIMES, 1), END), "replay"),
        ((no("reroute", "x"), replay(TIMES, Time(1.0), 1, why_not="y"), reload(TIMES, 1), END), "end"),
        ((no("reroute", "x"), no("replay", "y"), replace(reload(TIMES, 1), why_not=""), END), "reload"),
    ),
)
def test_what_can_be_decides(given, taken):
    assert Decision(given).taken.name == taken


def test_what_is_assumed_or_not_known_is_said():
    unsure = replace(TIMES, start=Time(10.0, ASSUMED), load=Time(0.0, recovery_ways.UNKNOWN))
    way = replay(unsure, step_of(TIMES.work, [Group(2, 2)]), 1)
    assert way.cost == "10.9 s (start 10 s, assumed; load not known; 1 step 0.9 s, assumed)"
    assert way.details["assumed"] == ["start", "load", "steps"]


def test_a_lost_worker_s_throughput_is_missing_until_it_is_back():
    way = reroute(Time(0.04), Time(10.0, ASSUMED), 0.75)
    assert way.seconds == pytest.approx(2.54)
    assert way.cost == (
        "2.54 s (pause 0.04 s; slower steps 2.5 s, assumed, at 75% of the throughput for 10 s until the seat is filled "
        "again)"
    )
    assert reroute(Time(0.04), None, 0.75).cost == "0.04 s (pause 0.04 s; then 75% of the throughput, for good)"


# --- groups, and who shares ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "found"),
    (((1,), ((1, 1),)), ((2, 1), ((1, 2),)), ((0, 3), ((0, 0), (3, 3))), ((0, 1, 3, 4, 6), ((0, 1), (3, 4), (6, 6)))),
)
def test_neighbours_are_one_group(stages, found):
    assert groups(stages) == found


def test_stages_of_a_group_wait_for_each_other_and_groups_do_not():
    work = tuple(map(Time, (1.0, 2.0, 4.0, 8.0)))
    assert step_of(work, groups((1,))) == Time(2.0)
    assert step_of(work, groups((1, 2))) == Time(6.0)
    assert step_of(work, groups((0, 3))) == Time(8.0)
    assert step_of(work, [Group(0, 3)]) == Time(15.0), "live stages that replay along"
    assert step_of(work, groups((1,)), Sharing(3, 0.25)) == Time(0.5)


@pytest.mark.parametrize(
    ("size", "live", "limit", "found"),
    (
        (1, 3, None, (3, 0.25)),
        (1, 9, None, (7, 0.125)),
        (1, 3, 1, (1, 0.5)),
        (1, 3, 0, (0, 1.0)),
        (4, 3, None, (1, 0.5)),
        (3, 2, None, (2, 0.5)),
    ),
)
def test_blocks_are_shared_as_they_are_dealt(size, live, limit, found):
    """Two replicas of four micro-batches."""
    assert shared(Blocks(Topology(2, 3, 4), size), live, limit) == found


# --- of a job -----------------------------------------------------------------------------------------


def decision(out: CoordinatorOutput) -> Event:
    (found,) = [event for event in out.events if event.kind == "recovery"]
    return found


def test_a_replay_is_predicted_from_what_the_steps_have_taken():
    """Two micro-batches, one for each of the two that are left and replay; the stage's two workers compute 1 s."""
    found = decision(lose(trained(write_s=0.25), 2, 3, now=7.0))
    assert found.text == ("stage 1 is without a worker: replayed from the logs, 3 steps; the others wait, about 11.8 s")
    details = found.details
    assert (details["way"], details["seconds"], details["assumed"]) == ("replay", 11.75, ["start"])
    assert (details["groups"], details["helpers"], details["steps"]) == ([[1, 1]], 1, 3)
    assert details["instead"]["reload"]["seconds"] == 16.25


def test_without_figures_the_cost_model_speaks_and_it_is_said():
    membership = started(log=True, rejoin="always", helpers=0)
    membership.receive(Durable(0, 0, "a folder"), 0.0)
    found = decision(lose(membership, 2, 3, now=7.0))
    assert found.details["assumed"] == ["start", "load", "steps"] and found.details["helpers"] == 0


def test_who_has_peers_is_rerouted_and_that_is_said_once_these_have_planned():
    membership = trained()
    out = lose(membership, 2, now=7.0)
    assert not [event for event in out.events if event.kind == "recovery"]
    out = agree(membership, membership.generation, {0: 3, 1: 3, 3: 3})
    found = decision(out)
    assert found.text.startswith("seat 0.1 (rank 2) is lost: others of the stage take the work; costs about ")
    assert found.text.endswith(" s until the seat is filled again")
    assert found.details["way"] == "reroute" and found.details["seats"] == ["0.1"]
    assert found.details["throughput"] == 1.0, "the plans of these workers take no time"


def test_two_that_are_lost_at_once_are_one_decision():
    membership = trained()
    lose(membership, 0, 3, now=7.0)
    found = decision(agree(membership, membership.generation, {1: 3, 2: 3}))
    assert found.text.startswith(
        "seat 0.0 (rank 0) and seat 1.1 (rank 3) are lost: others of the stage take the work; "
    )


@pytest.mark.parametrize("unit", ["worker", "replica"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 1000])
def test_a_line_is_short_however_many_are_lost(unit, count):
    lost = [member(rank, replicas=100) for rank in range(100, 100 + count)]
    assert len(recovery_ways.who_is_lost(lost, unit, shrinks=False)) <= 120, "and about 50 for what it costs"


def test_who_is_lost_with_the_rest_of_its_stage_is_not_rerouted():
    membership = trained()
    lose(membership, 2, 3, now=7.0)
    assert membership.course.unsaid == {}


def test_where_nobody_comes_back_the_throughput_is_less_for_good():
    membership = trained(rejoin="never")
    lose(membership, 2, now=7.0)
    found = decision(agree(membership, membership.generation, {0: 3, 1: 3, 3: 3}))
    assert found.text.endswith(" s and keeps throughput at 100%")


def test_an_end_says_why_and_what_it_is_to_go_on_by_hand():
    membership = trained(rejoin="never")
    found = decision(lose(membership, 2, 3, now=7.0))
    assert found.text == "stage 1 can't be replayed: recycle.rejoin is never, and no spare waits"
    assert found.details["way"] == "end" and found.details["instead"]["replay"]["seconds"] == 11.5


# --- what was measured --------------------------------------------------------------------------------


def test_the_job_s_own_start_is_the_first_measurement():
    """Of the slowest rank."""
    membership = Membership(4)
    for rank in range(4):
        membership.supervisor(rank, True, 1.0)
    for rank in range(4):
        membership.receive(Ready(member(rank), 0, job()), 3.0 + rank)
    assert membership.course.recovery_times.start_up_s == 5.0


def test_who_comes_back_is_measured_from_when_its_supervisor_was_to_start_it():
    membership = trained()
    assert membership.course.recovery_times.start_up_s is None
    assert recovery_ways.times_of(membership.course).start == Time(1.0 + START_UP_S, ASSUMED)
    lose(membership, 2, now=7.0)
    back = WorkerId(2, 1)
    membership.identify(back)
    membership.greet(back, "h")
    ready = Ready(replace(member(2), incarnation=1), 0, job(log=True, rejoin="always"))
    membership.receive(ready, 12.0)  # it died at 7 s, and was started 1 s later
    assert membership.course.recovery_times.start_up_s == 4.0
    assert recovery_ways.times_of(membership.course).start == Time(5.0)


def test_a_load_goes_before_what_a_checkpoint_took_to_be_written():
    membership = trained(write_s=2.0)
    lose(membership, 2, 3, now=7.0)
    assert recovery_ways.times_of(membership.course).load == Time(2.0)
    membership.identify(WorkerId(2, 1))
    membership.receive(Note(2, "restored", "it has", {"seconds": 0.75}, incarnation=1), 9.0)
    assert recovery_ways.times_of(membership.course).load == Time(0.75)
