"""Suspicion comes before eviction, and a stage's last worker is not evicted on suspicion."""

from __future__ import annotations

import re

import pytest

from recycle_plugin.core.messages.from_workers import (
    BarrierReached,
    Exited,
    Heartbeat,
    SupervisorHeartbeat,
    SurvivorReport,
)
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from tests.support.membership import agree, computes, started, step
from tests.support.played import BUSY_S, DEADLINE_S, IDLE_S, LAST_S, Played, ends


def test_suspicion_is_said_before_anybody_is_given_up_and_taken_back_where_it_was_wrong():
    played = Played(busy={2}).first_step()
    played.at[2] = computes("1F0.1@2")
    played.live_for(BUSY_S / 3 - 0.5)
    assert played.said == []
    played.live_for(1.0)
    played.done[2] += 1
    played.live_for(1.0)
    suspected, cleared = played.said
    assert re.fullmatch(
        r"seat 0\.1 \(rank 2\): it computes 1F0\.1@2 for 6\.\d s, its process using 1\d\d% of a core; it is given up "
        r"after 20\.0 s",
        suspected.text,
    )
    assert cleared.text.startswith("seat 0.1 (rank 2) goes on after 7.")


def test_a_process_that_computes_has_longer_than_one_that_does_nothing():
    played = Played(busy={2}).first_step()
    played.at[2] = computes("1F0.1@2")
    played.live_for(BUSY_S - 0.5)
    assert played.events == []
    played.live_for(1.0)
    assert played.given_up() == ["it computes 1F0.1@2"]


def test_where_nobody_can_tell_what_it_uses_it_may_be_computing():
    played = Played().first_step()
    played.at[2] = computes("1F0.1@2")
    for _ in range(round((BUSY_S - 0.5) / TICK_S)):
        for rank in range(4):
            played.membership.receive(SupervisorHeartbeat(rank, False), played.now)
            played.membership.receive(Heartbeat(rank, 1, 0, played.at[rank]), played.now)
        played.tick(TICK_S)
    assert played.events == [] and played.doubts() == [("suspected", "0.1")]


@pytest.mark.parametrize(
    "again, for_s", [("0F0.1@2", IDLE_S), ("0I0.1@2", IDLE_S), ("0F1.0@2", DEADLINE_S), ("0F0.1@3", DEADLINE_S)]
)
def test_what_has_cost_one_worker_is_no_proof_against_the_next(again, for_s):
    """... whatever the next does with that micro-batch, in that step."""
    played = Played(started(replicas=4, stages=1)).first_step()
    played.at[2] = computes("0F0.1@2")
    played.live_for(DEADLINE_S + 0.5)
    assert played.given_up() == ["it computes 0F0.1@2"]
    agree(played.membership, 1, {0: 1, 1: 1, 3: 1})
    played.at[1] = computes(again)
    played.live_for(for_s - 0.5)
    assert len(played.given_up()) == 1
    played.live_for(1.0)
    assert played.given_up()[1:] == [f"it computes {again}"]


def test_who_was_at_a_step_that_is_committed_is_so_no_more():
    """Its next beat may be under way."""
    played = Played().first_step()
    played.at[2] = computes("1F0.1@2")
    played.live_for(DEADLINE_S - 0.5)
    step(played.membership, 0, 2)
    played.live_for(1.0)
    assert played.events == [] and played.doubts() == [("suspected", "0.1"), ("cleared", "0.1")]


def test_after_an_earlier_checkpoint_its_steps_are_computed_again():
    played = Played()
    for number in range(1, 6):
        step(played.membership, 0, number)
    for rank in range(4):
        played.membership.receive(BarrierReached(rank, 0, Barrier(Meets.LOADED), {}), played.now)
    for rank in range(4):
        played.membership.receive(SurvivorReport(rank, 1, 1, "plan", loaded=True), played.now)
    played.at[2] = computes("1F0.1@2")
    played.live_for(DEADLINE_S + 0.5)
    assert played.given_up() == ["it computes 1F0.1@2"]


@pytest.mark.parametrize("how", ["stopped", "gone", "computes"])
def test_the_last_worker_of_a_stage_is_not_given_up_but_the_job_ends_after_its_own_deadline(how):
    played = Played().first_step()
    played.membership.receive(Exited(2, -9, 0.0), played.now)
    agree(played.membership, 1, {0: 1, 1: 1, 3: 1})
    played.live_for(1.0)
    if how == "computes":
        played.at[3] = computes("1F0.1@2")
    else:
        setattr(played, how, {3})
    played.live_for(LAST_S - 1)
    assert played.events == [] and played.doubts() == [("suspected", "1.1")]
    assert "the job ends after 40 s" in played.said[0].text
    played.live_for(2.0)
    (end,) = ends(played)
    assert end.failed and "seat 1.1 (rank 3), the last worker of stage 1: " in end.reason
    assert "Who waits for whom: seats 0.0 (rank 0), 1.0 (rank 1) wait for something" in end.reason
    assert not played.given_up() and not played.fenced()


def test_the_last_worker_may_come_back_until_then():
    played = Played().first_step()
    played.membership.receive(Exited(2, -9, 0.0), played.now)
    agree(played.membership, 1, {0: 1, 1: 1, 3: 1})
    played.live_for(1.0)
    played.gone = {3}
    played.live_for(LAST_S - 2)
    played.gone = set()
    played.live_for(1.0)
    assert played.events == [] and played.doubts() == [("suspected", "1.1"), ("cleared", "1.1")]


def test_where_most_fall_silent_together_the_coordinators_host_may_be_deaf_and_nobody_is_given_up_for_a_while():
    """Without all of them the job would end; by then they have ended by themselves."""
    played = Played().first_step()
    played.gone = {1, 2, 3}
    limit_s = played.membership.state.attendance.failure_detector.deadlines.cut_off_s
    played.live_for(limit_s - 1)
    assert played.events == [] and len(played.doubts()) == 3
    assert all(
        f"it is given up after {limit_s:.1f} s" in one.text and "may be cut off" in one.text for one in played.said
    )
    played.gone = set()
    played.live_for(1.0)
    assert played.events == [] and [kind for kind, _ in played.doubts()[3:]] == ["cleared"] * 3
    played.gone = {1, 2, 3}
    played.live_for(limit_s + 1)
    assert len(played.given_up()) > 1


def test_half_of_the_workers_that_fall_silent_are_given_up_as_soon_as_one_is():
    played = Played().first_step()
    played.gone = {1, 2}
    played.live_for(4.0)
    assert len(played.given_up()) == 2
