"""Which way a loss goes, and the times that deadlines of a replay follow from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle_plugin.core.coordinator import recovery_ways
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, Event
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.recovery_ways import ASSUMED, START_UP_S, Group, Time, groups, step_of
from recycle_plugin.core.messages.from_workers import Note, Ready
from recycle_plugin.core.vocabulary.roster import WorkerId
from tests.support.membership import agree, job, member
from tests.support.replaying import lose, trained

# --- groups ---------------------------------------------------------------------------------------------


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


# --- of a job -----------------------------------------------------------------------------------------


def decision(out: CoordinatorOutput) -> Event:
    (found,) = [event for event in out.events if event.kind == "recovery"]
    return found


def test_a_replay_says_over_how_many_steps():
    found = decision(lose(trained(write_s=0.25), 2, 3, now=7.0))
    assert found.text == "stage 1 is without a worker: replayed from the logs, 3 steps; the others wait"
    assert (found.details["way"], found.details["steps"]) == ("replay", 3)


def test_who_has_peers_is_rerouted_and_that_is_said_once_these_have_planned():
    membership = trained()
    out = lose(membership, 2, now=7.0)
    assert not [event for event in out.events if event.kind == "recovery"]
    out = agree(membership, membership.generation, {0: 3, 1: 3, 3: 3})
    found = decision(out)
    assert found.text == "seat 0.1 (rank 2) is lost: other workers of the stage take the work"
    assert found.details == {"way": "reroute", "seats": ["0.1"]}


def test_two_that_are_lost_at_once_are_one_decision():
    membership = trained()
    lose(membership, 0, 3, now=7.0)
    found = decision(agree(membership, membership.generation, {1: 3, 2: 3}))
    assert found.text == "seat 0.0 (rank 0) and seat 1.1 (rank 3) are lost: other workers of the stage take the work"


@pytest.mark.parametrize("unit", ["worker", "replica"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 1000])
def test_a_line_is_short_however_many_are_lost(unit, count):
    lost = [member(rank, replicas=100) for rank in range(100, 100 + count)]
    assert len(recovery_ways.who_is_lost(lost, unit, shrinks=False)) <= 120


def test_who_is_lost_with_the_rest_of_its_stage_is_not_rerouted():
    membership = trained()
    lose(membership, 2, 3, now=7.0)
    assert membership.state.unsaid == {}


def test_an_end_says_why():
    membership = trained(rejoin="never")
    found = decision(lose(membership, 2, 3, now=7.0))
    assert found.text == "stage 1 can't be replayed: recycle.rejoin is never, and no spare waits"
    assert found.details["way"] == "end"


# --- what was measured --------------------------------------------------------------------------------


def test_the_job_s_own_start_is_the_first_measurement():
    """Of the slowest rank."""
    membership = Membership(4)
    for rank in range(4):
        membership.supervisor(rank, True, 1.0)
    for rank in range(4):
        membership.receive(Ready(member(rank), 0, job()), 3.0 + rank)
    assert membership.state.recovery_times.start_up_s == 5.0


def test_who_comes_back_is_measured_from_when_its_supervisor_was_to_start_it():
    membership = trained()
    assert membership.state.recovery_times.start_up_s is None
    assert recovery_ways.times_of(membership.state).start == Time(1.0 + START_UP_S, ASSUMED)
    lose(membership, 2, now=7.0)
    back = WorkerId(2, 1)
    membership.identify(back)
    membership.greet(back, "h")
    ready = Ready(replace(member(2), incarnation=1), 0, job(log=True, rejoin="always"))
    membership.receive(ready, 12.0)  # it died at 7 s, and was started 1 s later
    assert membership.state.recovery_times.start_up_s == 4.0
    assert recovery_ways.times_of(membership.state).start == Time(5.0)


def test_a_load_goes_before_what_a_checkpoint_took_to_be_written():
    membership = trained(write_s=2.0)
    lose(membership, 2, 3, now=7.0)
    assert recovery_ways.times_of(membership.state).load == Time(2.0)
    membership.identify(WorkerId(2, 1))
    membership.receive(Note(2, "restored", "it has", {"seconds": 0.75}, incarnation=1), 9.0)
    assert recovery_ways.times_of(membership.state).load == Time(0.75)
